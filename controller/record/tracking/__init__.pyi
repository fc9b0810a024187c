from .feed import count_missing as count_missing
from .recorder import Recorder as Recorder
