"""Finished runs: their artifacts, versions, items and histories, and requests made into questions for an engine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
