from .batch import StreamBatch as StreamBatch
from .feed import StreamFeed as StreamFeed
from .file_stats import measure_files as measure_files
from .ray_engine import plan_tasks as plan_tasks
from .stream import Stream as Stream
from .stream import read as read
