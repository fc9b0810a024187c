from .known_sids import KnownSids as KnownSids
from .rq_kmeans import check_tokenizer as check_tokenizer
from .rq_kmeans import tokenise as tokenise
