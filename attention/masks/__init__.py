"""Masks as data: what a mask says, as at most four key intervals a query."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
