from . import chunked as chunked
from . import npu as npu
from . import sdpa as sdpa
from .dense_reference import attend_reference as attend_reference
from .tiles import split_mask as split_mask
