"""Tables: what a sparse table is, in C++ and in NumPy, with its optimizers and policies."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
