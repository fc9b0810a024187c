from .log import EventLog as EventLog
from .preparing import Prepared as Prepared
from .preparing import BuildOptions as BuildOptions
from .preparing import prepare as prepare
from .progress import Report as Report
