"""Train engines, a file each: how dense weights are laid out over ranks, stepped, saved and published."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
