"""Runs in object storage: conditional writes, the tree of a run's files, and the local copy of them on every node."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
