"""How fast a plan should be: a calibrated cost model, its search and its receipts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
