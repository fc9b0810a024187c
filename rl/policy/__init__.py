"""Sampling of items from a policy, and exact statistics of a policy over the catalogue."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
