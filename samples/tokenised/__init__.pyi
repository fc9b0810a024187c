from .items import as_array as as_array  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .items import read_items as read_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .stored import StoredSequences as StoredSequences
from .stored import UserEvents as UserEvents
from .vectors import VECTOR_FILES as VECTOR_FILES
from .vectors import add_vector_fields as add_vector_fields  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import attach_vectors as attach_vectors  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import check_finite as check_finite
from .vectors import has_vectors as has_vectors  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import is_vector_type as is_vector_type  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import read_vector_column as read_vector_column  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import read_vector_file as read_vector_file  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
