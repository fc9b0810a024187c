from .breaker import Breaker as Breaker
from .limits import Limits as Limits
