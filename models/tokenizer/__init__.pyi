from .known_sids import KnownSids as KnownSids
from .semantic_ids import check_tokenizer as check_tokenizer  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .semantic_ids import describe_codebooks as describe_codebooks
from .semantic_ids import number_collisions as number_collisions
from .semantic_ids import tokenise as tokenise  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .signals import check_signals as check_signals  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .signals import compute_signals as compute_signals  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .signals import extend_signals as extend_signals  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .signals import list_word_columns as list_word_columns  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vectors import compute_item_vectors as compute_item_vectors  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
