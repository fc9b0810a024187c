from .collection import EmbeddingBagCollection as EmbeddingBagCollection
from .collection import ReadRows as ReadRows
from .features import hash_text as hash_text
from .table_config import TableConfig as TableConfig
