from .dispatch import dispatch as dispatch
from .placement import placement as placement
from .startup import startup as startup
