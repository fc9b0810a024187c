"""The artifacts of a run: how they are made from its data, written, and shared by runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
