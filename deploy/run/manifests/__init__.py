"""Files that run scenarios on other people's clusters, and that monitor runs there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
