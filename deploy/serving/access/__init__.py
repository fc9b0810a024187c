"""Access: who may ask how much, and when a service that fails is left alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
