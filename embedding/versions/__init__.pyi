from .native_snapshot import ReadBuffers as ReadBuffers
from .native_snapshot import write_out as write_out
from .snapshot import History as History
from .snapshot import Snapshot as Snapshot
from .snapshot import open_all as open_all
