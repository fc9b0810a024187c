from .blocks import Block as Block
from .blocks import rotary as rotary
from .decoder import SidDecoder as SidDecoder
from .loss import sid_loss as sid_loss
