from .build import Keep as Keep
from .build import UnknownItems as UnknownItems
from .build import convert_column as convert_column  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import drop_unknown_events as drop_unknown_events  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import index_items as index_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import make_item_table as make_item_table  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import parse_min_events as parse_min_events
from .build import select_carried_columns as select_carried_columns  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .build import select_events as select_events
from .compression import COUNT as COUNT
from .compression import KINDS as KINDS
from .compression import ROW as ROW
from .compression import SPAN as SPAN
from .compression import Compress as Compress
from .compression import CompressedLog as CompressedLog
from .compression import FoldedRepeats as FoldedRepeats
from .compression import compress_log as compress_log  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .compression import drop_repeat_lists as drop_repeat_lists  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .compression import encode_categories as encode_categories  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .compression import expand_log as expand_log  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .flat import FLAT_META as FLAT_META
from .flat import ITEM_KEYS as ITEM_KEYS
from .flat import USER_IDS as USER_IDS
from .flat import FlatFiles as FlatFiles
from .flat import MappedSequences as MappedSequences
from .flat import choose_flat_format as choose_flat_format
from .flat import load_item_keys as load_item_keys
from .flat import release_pages as release_pages
from .labels import LABEL_END as LABEL_END
from .labels import LABEL_TIME as LABEL_TIME
from .labels import MAX_LABELS as MAX_LABELS
from .labels import NEVER as NEVER
from .labels import LabelCounts as LabelCounts
from .labels import Labels as Labels
from .labels import add_labels as add_labels  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import attach_label as attach_label  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import check_label_ids as check_label_ids  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import compute_label_times as compute_label_times  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import drop_unlabelled_events as drop_unlabelled_events  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import find_newest_time as find_newest_time
from .labels import find_tasks as find_tasks
from .labels import is_task as is_task
from .labels import limit_label_ends as limit_label_ends
from .labels import list_label_time_columns as list_label_time_columns  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import match_target as match_target  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .labels import name_task as name_task
from .pairs import PairCounter as PairCounter
from .pairs import find_top_neighbours as find_top_neighbours
from .repeats import ALLOW as ALLOW
from .repeats import LIMIT as LIMIT
from .repeats import MASK as MASK
from .repeats import choose_policy as choose_policy
from .repeats import compute_repeat_shares as compute_repeat_shares
from .repeats import find_duplicates as find_duplicates
from .repeats import find_repeats as find_repeats
from .sequences import Sequences as Sequences
from .sequences import build_sequences as build_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .split import RL as RL
from .split import TEST as TEST
from .split import TRAIN as TRAIN
from .split import VALID as VALID
from .split import Split as Split
from .split import SplitFacts as SplitFacts
from .split import check_split as check_split
from .split import compute_split_codes as compute_split_codes
from .split import draw_cold_items as draw_cold_items
from .split import get_part_starts as get_part_starts
from .split import get_training_end as get_training_end
from .split import mask_cold_events as mask_cold_events
from .sums import EventTotals as EventTotals
from .sums import count_duplicates as count_duplicates
from .ties import shuffle_ties as shuffle_ties
from .transitions import CountOptions as CountOptions
from .transitions import Transitions as Transitions
from .transitions import check_kinds as check_kinds
from .transitions import compute_decay as compute_decay
from .transitions import list_count_names as list_count_names
from .transitions import select_kinds as select_kinds
from .user_file import find_user_rows as find_user_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .user_file import load_user_keys as load_user_keys
