from .build import catalogue_index as catalogue_index  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import kept_events as kept_events
from .repeats import ALLOW as ALLOW
from .repeats import MASK as MASK
from .repeats import repeated as repeated
from .repeats import shares as shares
from .sequences import Sequences as Sequences
from .sequences import build_sequences as build_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .sequences import item_keys as item_keys
from .sequences import user_keys as user_keys
from .split import RL as RL
from .split import TEST as TEST
from .split import TRAIN as TRAIN
from .split import VALID as VALID
from .ties import shuffle_ties as shuffle_ties
from .transitions import CountOptions as CountOptions
from .transitions import Transitions as Transitions
from .transitions import faded as faded
from .transitions import of_kinds as of_kinds
