from .collection import EmbeddingBagCollection as EmbeddingBagCollection
from .collection import LocalRowSource as LocalRowSource
from .collection import ReaderRowSource as ReaderRowSource
from .collection import RowSource as RowSource
from .collection import TableConfig as TableConfig
from .features import hash_text as hash_text  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
