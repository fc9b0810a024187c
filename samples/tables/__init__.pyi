from .conditions import condition as condition  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .conditions import matches as matches  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .conditions import names_in as names_in
from .files import Partitions as Partitions
from .files import find_files as find_files
from .files import find_parquet as find_parquet  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .files import notice as notice
from .guesses import NAMES as NAMES
from .guesses import OF_INTERACTIONS as OF_INTERACTIONS
from .guesses import OF_ITEMS as OF_ITEMS
from .guesses import bare_name as bare_name
from .guesses import finest_times as finest_times  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .guesses import guess_by_type as guess_by_type  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .guesses import guess_roles as guess_roles
from .guesses import plain_name as plain_name
from .guesses import same_item_column as same_item_column
from .guesses import time_candidates as time_candidates
from .keys import NONE as NONE
from .keys import as_numbers as as_numbers  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .keys import keys_in as keys_in
from .paths import GROUP_ROWS as GROUP_ROWS
from .paths import count_rows as count_rows
from .paths import first_rows as first_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import pack_files as pack_files
from .paths import parquet_footer as parquet_footer  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import parquet_schema as parquet_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import read_groups as read_groups  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import united_schema as united_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .paths import write_parquet as write_parquet  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .retries import CorruptDataError as CorruptDataError
from .retries import UnreachableDataError as UnreachableDataError
from .retries import read_with_retries as read_with_retries
from .retries import says_corrupt as says_corrupt  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import MISSING as MISSING
from .tables import ROLES as ROLES
from .tables import Columns as Columns
from .tables import TableFormat as TableFormat
from .tables import check_columns as check_columns
from .tables import check_events as check_events  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import check_interactions as check_interactions  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import check_items as check_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import read_interactions as read_interactions  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import read_items as read_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import read_tables as read_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import split_categories as split_categories  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .tables import to_table_format as to_table_format
from .times import implausible as implausible
from .times import is_plain as is_plain  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .times import unit_by_name as unit_by_name
from .times import unit_by_size as unit_by_size
from .times import unix_seconds as unix_seconds  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .unite import conform as conform  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .unite import unite_schemas as unite_schemas  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .word_lists import one_word_lists as one_word_lists
