"""Runs from the driver's side: the Python API, the progress panel and planning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
