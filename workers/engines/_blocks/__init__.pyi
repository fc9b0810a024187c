from .block_forward import find_blocks as find_blocks
from .block_forward import prepare as prepare
from .tensor_parallel import TensorLayout as TensorLayout
from .tensor_parallel import parallelise_blocks as parallelise_blocks
