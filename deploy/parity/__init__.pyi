from .device_parity import parity as parity
from .device_parity import parse_limits as parse_limits
