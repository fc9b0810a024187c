from .formats import get_importer as get_importer
from .import_csv import describe_missing_header as describe_missing_header
from .import_csv import has_column_numbers as has_column_numbers
from .import_csv import read_csv_tables as read_csv_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .import_csv import resolve_column_numbers as resolve_column_numbers
from .importers import write_tables as write_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .text_form import TextForm as TextForm
from .text_form import is_parquet_file as is_parquet_file
from .text_tables import ENDINGS as ENDINGS
from .text_tables import is_parquet_table as is_parquet_table
from .text_tables import list_data_files as list_data_files
from .text_tables import read_first_text_rows as read_first_text_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .text_tables import read_text as read_text  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .text_tables import read_text_schema as read_text_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
