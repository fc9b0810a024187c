"""Serving: a finished run behind an HTTP address, its published versions, and batch recommendations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
