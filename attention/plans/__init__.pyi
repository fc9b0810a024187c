from .tile_configs import PLAIN_SLOTS as PLAIN_SLOTS
from .tile_configs import KernelTile as KernelTile
from .tile_configs import TileConfig as TileConfig
from .tile_configs import select_config as select_config
from .tile_plan import make_plan as make_plan
from .tile_plan import make_plans as make_plans
from .tiles import TilePlan as TilePlan
from .tiles import TilePlans as TilePlans
from .tiles import Tiles as Tiles
from .triton_plan import key_kernel as key_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_plan import query_kernel as query_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_plan import summary_kernel as summary_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
