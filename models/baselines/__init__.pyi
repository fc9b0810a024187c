from ._rehearsal import check_scores as check_scores
from ._rehearsal import rehearse as rehearse
from .base import BASELINES as BASELINES
from .base import Baseline as Baseline
from .base import BaselineOptions as BaselineOptions
from .base import BaselineSpec as BaselineSpec
from .base import SparseVotes as SparseVotes
from .base import make_baseline as make_baseline  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .kinds.popularity import Popularity as Popularity
