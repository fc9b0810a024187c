from .base import BASELINES as BASELINES
from .base import Baseline as Baseline
from .base import BaselineOptions as BaselineOptions
from .base import BaselineSpec as BaselineSpec
from .base import SparseVotes as SparseVotes
from .base import make_baseline as make_baseline  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .popularity import Popularity as Popularity
from .sasrec import FULL_SOFTMAX as FULL_SOFTMAX
from .sasrec import SasRecOptions as SasRecOptions
from .transition_counter import score_all_items as score_all_items
from .transition_counter import sum_votes as sum_votes
