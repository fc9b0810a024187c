from .device_parity import compare_pools as compare_pools
from .device_parity import parse_limits as parse_limits
