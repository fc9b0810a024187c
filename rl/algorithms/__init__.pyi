from .base import ALGORITHMS as ALGORITHMS
from .base import Algorithm as Algorithm
from .base import LossInputs as LossInputs
