from .batch import Batch as Batch
from .feed import Feed as Feed
from .file_stats import stats as stats
from .ray_engine import plan_tasks as plan_tasks
from .stream import Stream as Stream
from .stream import read as read
