from .decoder import SidDecoder as SidDecoder
from .loss import sid_loss as sid_loss
