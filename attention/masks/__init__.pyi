from .cu_seqlens import check_cuts as check_cuts
from .dense_mask import to_dense as to_dense
from .dense_mask import visible as visible
from .from_dense import read_rows as read_rows
from .interval_table import IntervalTable as IntervalTable
from .mask import UniMask as UniMask
from .packed import Packed as Packed
from .packed import Rows as Rows
