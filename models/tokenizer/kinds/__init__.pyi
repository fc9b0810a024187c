from .base import TOKENIZERS as TOKENIZERS
from .base import TokenisedItems as TokenisedItems
from .base import Tokenizer as Tokenizer
from .base import TokenizeRequest as TokenizeRequest
from .base import TokenizerSpec as TokenizerSpec
