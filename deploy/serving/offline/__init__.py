"""Offline recommendations: batch answers for tables of users, and exports that need no Ray."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
