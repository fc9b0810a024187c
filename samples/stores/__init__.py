"""Stores: columns by key, with versions by time: packed segments, LMDB, Redis, HBase; and their join to samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
