from . import chunked as chunked
from . import npu as npu
from . import sdpa as sdpa
from .dense_reference import reference as reference
from .tiles import pieces_of as pieces_of
