"""Generation that never leaves the catalogue: trie, beam search, exhaustive scores, log-probabilities."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
