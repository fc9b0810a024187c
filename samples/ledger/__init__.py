"""Ledger: which rows a model has learned from, counted in a seeded order that does not depend on who reads them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
