from .conditions import compile_condition as compile_condition  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .conditions import infer_types as infer_types  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .conditions import list_names as list_names
from .conditions import match_rows as match_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .files import FolderColumns as FolderColumns
from .files import find_files as find_files
from .files import find_parquet as find_parquet  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .files import get_licence_notice as get_licence_notice
from .guesses import NAMES as NAMES
from .guesses import OF_INTERACTIONS as OF_INTERACTIONS
from .guesses import OF_ITEMS as OF_ITEMS
from .guesses import align_item_column as align_item_column
from .guesses import choose_time_column as choose_time_column  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .guesses import guess_by_type as guess_by_type  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .guesses import guess_categories as guess_categories  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .guesses import guess_roles as guess_roles
from .guesses import list_time_candidates as list_time_candidates
from .guesses import normalise_name as normalise_name
from .guesses import strip_type_suffix as strip_type_suffix
from .ids import IdKind as IdKind
from .ids import convert_ids as convert_ids
from .ids import describe_rewritten_ids as describe_rewritten_ids  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .keys import NONE as NONE
from .keys import as_numbers as as_numbers  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .keys import compute_keys as compute_keys
from .paths import GROUP_ROWS as GROUP_ROWS
from .paths import count_rows as count_rows
from .paths import pack_files as pack_files
from .paths import read_first_rows as read_first_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_groups as read_groups  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_parquet as read_parquet  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_parquet_footer as read_parquet_footer  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_parquet_schema as read_parquet_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_unified_schema as read_unified_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import write_parquet as write_parquet  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .retries import CorruptDataError as CorruptDataError
from .retries import UnreachableDataError as UnreachableDataError
from .retries import identify_file as identify_file  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .retries import is_corruption as is_corruption  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .retries import read_with_retries as read_with_retries
from .table_format import FRACTION as FRACTION
from .table_format import MISSING as MISSING
from .table_format import ROLES as ROLES
from .table_format import Columns as Columns
from .table_format import TableFormat as TableFormat
from .table_format import to_table_format as to_table_format
from .tables import check_columns as check_columns
from .tables import check_events as check_events  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import check_interactions as check_interactions  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import check_items as check_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import list_id_names as list_id_names
from .tables import read_interactions as read_interactions  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import read_items as read_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import read_tables as read_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import refuse_internal_columns as refuse_internal_columns
from .tables import replace_column as replace_column  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import split_categories as split_categories  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .times import UNIT_NAMES as UNIT_NAMES
from .times import convert_times as convert_times  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .times import convert_to_seconds as convert_to_seconds  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .times import find_implausible as find_implausible
from .times import find_unit as find_unit  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .times import get_unit_by_name as get_unit_by_name
from .times import get_unit_by_size as get_unit_by_size
from .times import is_plain as is_plain  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .unite import conform as conform  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .unite import unify_schemas as unify_schemas  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .word_lists import are_lists as are_lists  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .word_lists import describe_split as describe_split  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .word_lists import find_uncut_delimiter as find_uncut_delimiter
