from .device import HOST as HOST
from .device import PRECISIONS as PRECISIONS
from .device import claim as claim
from .device import device as device
from .environment import Environment as Environment
from .offload import Residency as Residency
from .offload import tensors_of as tensors_of
