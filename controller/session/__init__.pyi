from .objectives import scene_parts as scene_parts
from .session import Session as Session
