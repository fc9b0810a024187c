from .ranks import run_as_rank as run_as_rank
from .ranks import run_both_ranks as run_both_ranks
