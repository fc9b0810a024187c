from .import_csv import by_number as by_number
from .import_csv import named_by_number as named_by_number
from .import_csv import without_header as without_header
from .importers import importer as importer
from .text_form import TextForm as TextForm
from .text_form import is_parquet_file as is_parquet_file
from .text_tables import ENDINGS as ENDINGS
from .text_tables import first_text_rows as first_text_rows  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .text_tables import text_schema as text_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
