from .beam_cache import Cache as Cache
from .blocks import Block as Block
from .blocks import rotary as rotary
from .decoder import SidDecoder as SidDecoder
from .loss import sid_loss as sid_loss
from .spec import GAPS as GAPS
from .spec import RATINGS as RATINGS
from .spec import TYPES as TYPES
