from . import chunked as chunked
from . import npu as npu
from . import sdpa as sdpa
from .tiles import split_mask as split_mask
