from .checkpoint import load as load
from .checkpoint import load_update as load_update
from .checkpoint import save as save
