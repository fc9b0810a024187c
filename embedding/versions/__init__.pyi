from .native_snapshot import ReadBuffers as ReadBuffers
from .native_snapshot import write_out as write_out
from .snapshot import TableHistory as TableHistory
from .snapshot import TableSnapshot as TableSnapshot
from .snapshot import open_all as open_all
