from .objectives import sum_by_scene as sum_by_scene
from .session import Session as Session
