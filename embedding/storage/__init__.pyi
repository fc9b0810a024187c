from .checkpoint import load as load
from .checkpoint import save as save
from .checkpoint import update_of as update_of
