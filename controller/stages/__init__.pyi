from ._loops import probe_rewards as probe_rewards
from ._loops import run_stage as run_stage
from ._loops import smoke_test_rewards as smoke_test_rewards
from ._overlap import overlapped as overlapped
from ._prompt_groups import PromptGroups as PromptGroups
from .reinforced import Reinforced as Reinforced
from .supervised import Supervised as Supervised
from .supervised import SupervisedKind as SupervisedKind
