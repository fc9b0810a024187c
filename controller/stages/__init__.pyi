from ._loops import probe_rewards as probe_rewards
from ._loops import rehearse as rehearse
from ._loops import run_stage as run_stage
from .reinforced import Reinforced as Reinforced
from .supervised import Supervised as Supervised
from .supervised import SupervisedKind as SupervisedKind
