"""Features: histories, items and filters of a run, made into questions for an engine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
