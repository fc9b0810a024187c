from .counters import COUNTED as COUNTED
from .counters import Tally as Tally
from .counters import added_up as added_up
from .counters import since_then as since_then
from .pipeline import Pipeline as Pipeline
from .resharding import reshard as reshard
from .sharded_tables import SparseWorld as SparseWorld
