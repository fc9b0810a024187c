from ._device import compute_sqrt as compute_sqrt
from ._device import round_to_float32 as round_to_float32
from ._device import sum_squares as sum_squares
from .base import OPTIMIZERS as OPTIMIZERS
from .base import RowOptimizer as RowOptimizer
from .base import TableOptimizerSettings as TableOptimizerSettings
from .base import get_row_optimizer as get_row_optimizer
