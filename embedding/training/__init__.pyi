from .counters import COUNTED as COUNTED
from .counters import TableCounters as TableCounters
from .counters import added_up as added_up
from .counters import since_then as since_then
from .pipeline import PrefetchPipeline as PrefetchPipeline
from .resharding import reshard as reshard
from .sharded_tables import ShardedTables as ShardedTables
