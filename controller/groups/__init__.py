"""The worker groups of a run: start, handles, publishing, offloading and supervision."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
