"""The kinds of trackers, which receive the metrics of runs, one module each, and their interface."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
