from .beam_cache import DecoderCache as DecoderCache
from .blocks import AttentionBlock as AttentionBlock
from .blocks import compute_rotary as compute_rotary
from .decoder import SidDecoder as SidDecoder
from .loss import compute_sid_loss as compute_sid_loss
from .spec import GAPS as GAPS
from .spec import RATINGS as RATINGS
from .spec import TYPES as TYPES
