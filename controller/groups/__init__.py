"""The worker groups of a run: bound, opened, published to, moved, watched."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
