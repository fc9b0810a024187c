from ._ddp import Ddp as Ddp
from .base import ENGINES as ENGINES
from .base import EngineRuntime as EngineRuntime
from .base import Learning as Learning
from .base import TrainEngine as TrainEngine
from .base import learning_of as learning_of
from .base import make_engine as make_engine
