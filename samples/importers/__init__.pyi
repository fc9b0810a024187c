from .importers import csv_schema as csv_schema  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .importers import importer as importer
