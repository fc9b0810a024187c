from .base import TRACKERS as TRACKERS
from .base import MetricPoint as MetricPoint
from .base import TrackedRun as TrackedRun
from .base import Tracker as Tracker
from .base import TrackerKind as TrackerKind
from .base import TrackerSink as TrackerSink
from .base import parse_trackers as parse_trackers
