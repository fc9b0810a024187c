"""The shipped baselines, one module each with the keys that a scenario may give, and their interface."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
