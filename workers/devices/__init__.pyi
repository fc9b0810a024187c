from .environment import Environment as Environment
from .offload import Residency as Residency
from .offload import tensors_of as tensors_of
from .vendors import HOST as HOST
from .vendors import PRECISIONS as PRECISIONS
from .vendors import claim as claim
from .vendors import device as device
