"""Streams: files of rows as a lazy chain of operators, run beside the trainer or on Ray Data in one and the same order."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
