from .loops import probe_rewards as probe_rewards
from .loops import rehearse as rehearse
from .loops import run_stage as run_stage
