from .known_sids import KnownSids as KnownSids
from .options import FileTokenizer as FileTokenizer
from .options import RqKmeans as RqKmeans
from .rq_kmeans import check_tokenizer as check_tokenizer  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .rq_kmeans import tokenise as tokenise  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import compute_item_vectors as compute_item_vectors  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
