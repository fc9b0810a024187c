"""Memory: what transitions vote for, mixed with what a model says into one distribution over the catalogue."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
