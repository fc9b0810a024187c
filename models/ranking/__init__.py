"""Rankings of the whole catalogue: metrics of held-out events, what lists are like, and paired comparisons."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
