from .build import Keep as Keep
from .build import carried_columns as carried_columns  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import catalogue_index as catalogue_index  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import column_values as column_values  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import item_table as item_table  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import kept_events as kept_events
from .build import least_events as least_events
from .compression import COUNT as COUNT
from .compression import KINDS as KINDS
from .compression import SPAN as SPAN
from .compression import Compress as Compress
from .compression import Compressed as Compressed
from .compression import compress as compress  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .compression import expand as expand  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .flat import FLAT_FORMAT as FLAT_FORMAT
from .flat import FLAT_META as FLAT_META
from .flat import USER_IDS as USER_IDS
from .flat import FlatFiles as FlatFiles
from .flat import Mapped as Mapped
from .joined import joined_to as joined_to
from .labels import LABEL_TIME as LABEL_TIME
from .labels import NEVER as NEVER
from .labels import Labels as Labels
from .labels import LabelSetup as LabelSetup
from .labels import labelled as labelled  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .pairs import Pairs as Pairs
from .pairs import best_neighbours as best_neighbours
from .repeats import ALLOW as ALLOW
from .repeats import MASK as MASK
from .repeats import copies as copies
from .repeats import policy as policy
from .repeats import repeat_shares as repeat_shares
from .repeats import repeated as repeated
from .sequences import ITEM_KEYS as ITEM_KEYS
from .sequences import Sequences as Sequences
from .sequences import build_sequences as build_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .sequences import item_keys as item_keys
from .sequences import user_keys as user_keys
from .split import RL as RL
from .split import TEST as TEST
from .split import TRAIN as TRAIN
from .split import VALID as VALID
from .split import LeaveLastOut as LeaveLastOut
from .split import SplitFacts as SplitFacts
from .split import TimeSplit as TimeSplit
from .split import check_split as check_split
from .split import split_codes as split_codes
from .split import training_end as training_end
from .sums import Sums as Sums
from .sums import count_duplicates as count_duplicates
from .ties import shuffle_ties as shuffle_ties
from .transitions import CountOptions as CountOptions
from .transitions import Transitions as Transitions
from .transitions import faded as faded
from .transitions import of_kinds as of_kinds
