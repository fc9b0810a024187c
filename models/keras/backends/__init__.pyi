from .base import BACKENDS as BACKENDS
from .base import KerasBackend as KerasBackend
from .base import load_keras as load_keras
