"""Models whose weights ranks divide: their passes, their parts, and the slices of checkpoints."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
