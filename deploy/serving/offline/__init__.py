"""Offline: whole tables of users answered at once, and runs exported for programs that need no Ray."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
