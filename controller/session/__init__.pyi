from .objectives import sum_by_scene as sum_by_scene
from .session import Session as Session
from .stage_checkpoints import find_stage_start as find_stage_start
from .stage_checkpoints import recompute_rewards as recompute_rewards
from .start_notes import make_start_notes as make_start_notes
