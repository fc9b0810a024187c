from .cu_seqlens import check_cuts as check_cuts
from .dense_mask import compute_visible as compute_visible
from .dense_mask import to_dense as to_dense
from .from_dense import read_rows as read_rows
from .interval_table import IntervalTable as IntervalTable
from .mask import UniMask as UniMask
from .packed import MaskRows as MaskRows
from .packed import PackedGeometry as PackedGeometry
