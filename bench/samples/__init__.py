"""Benchmarks of samples: rows per second read into torch, resuming, and the cost of the ledger."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
