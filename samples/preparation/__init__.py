"""Preparation: events of any number to sequences, in memory that does not grow with them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
