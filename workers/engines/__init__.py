"""Train engines, a file each: how the dense part of a model is laid out over ranks, steps, is saved and published."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
