from .tile_configs import PLAIN_SLOTS as PLAIN_SLOTS
from .tile_configs import Config as Config
from .tile_configs import Tile as Tile
from .tile_configs import config_for as config_for
from .tile_plan import TilePlan as TilePlan
from .tile_plan import TilePlans as TilePlans
from .tile_plan import Tiles as Tiles
from .tile_plan import plan as plan
from .tile_plan import plans as plans
from .triton_plan import key_kernel as key_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_plan import query_kernel as query_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_plan import summary_kernel as summary_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
