from .items import as_array as as_array  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .items import read_items as read_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .stored import StoredSequences as StoredSequences
from .stored import UserEvents as UserEvents
