from .slices import SLICES as SLICES
from .slices import SliceMap as SliceMap
from .slices import SliceMove as SliceMove
from .slices import slice_of as slice_of
from .slices import splitmix64 as splitmix64
from .slices import within as within
