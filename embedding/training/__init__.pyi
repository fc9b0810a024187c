from .counters import COUNTED as COUNTED
from .counters import TableCounters as TableCounters
from .counters import merge_counts as merge_counts
from .counters import sum_shard_counts as sum_shard_counts
from .pipeline import PrefetchPipeline as PrefetchPipeline
from .resharding import reshard as reshard
from .sharded_tables import ShardedTables as ShardedTables
