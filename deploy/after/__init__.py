"""Analyses of finished runs: comparison with another run, evaluation on other data, several seeds."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
