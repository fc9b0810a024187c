"""DeepSpeed's ZeRO: the engine, its parts, and models whose blocks ZeRO 3 divides."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
