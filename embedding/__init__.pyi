from .slices import SLICES as SLICES
from .slices import SliceMap as SliceMap
from .slices import SliceMove as SliceMove
from .slices import compute_slices as compute_slices
from .slices import is_within as is_within
from .slices import splitmix64 as splitmix64
