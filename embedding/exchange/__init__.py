"""All2All: who owns which key, and how rows and gradients travel between ranks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
