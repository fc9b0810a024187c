"""How good commits are: rankings beside baselines, and the same questions asked on two devices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
