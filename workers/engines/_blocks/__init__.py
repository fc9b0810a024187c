"""What engines do to the blocks of a model: recomputation, compilation and tensor parallelism."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
