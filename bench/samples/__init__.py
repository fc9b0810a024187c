"""Benches of samples: rows a second to torch, resuming, and what the ledger costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
