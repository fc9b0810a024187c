"""The all-to-all exchanges of keys, rows and gradients between the ranks of a sparse world."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
