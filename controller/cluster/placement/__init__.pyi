from .base import NodeSlots as NodeSlots
from .base import Placement as Placement
from .base import PlacementPolicy as PlacementPolicy
from .base import pack_workers as pack_workers
