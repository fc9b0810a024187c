from .catalogue import ItemIndex as ItemIndex
from .catalogue import distinct_items as distinct_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .log import EventLog as EventLog
from .preparing import BuildOptions as BuildOptions
from .preparing import Prepared as Prepared
from .preparing import prepare as prepare
from .progress import Report as Report
from .sample import sample_of as sample_of  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
