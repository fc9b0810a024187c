"""Batched inference: questions of many callers are answered as one batch, with the answers that each would get alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
