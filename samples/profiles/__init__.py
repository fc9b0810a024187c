"""Profiles: what a data set is like, in numbers that settings and warnings follow from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
