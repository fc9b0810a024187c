from .deferred import record_build as record_build
from .environment import PoolEnvironment as PoolEnvironment
from .offload import OffloadableBuffers as OffloadableBuffers
from .offload import list_training_tensors as list_training_tensors
from .vendors import HOST as HOST
from .vendors import PRECISIONS as PRECISIONS
from .vendors import claim as claim
from .vendors import get_device as get_device
