from .parity import parity as parity
from .parity import parse_limits as parse_limits
