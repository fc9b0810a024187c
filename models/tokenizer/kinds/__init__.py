"""The kinds of tokenizers, one module each, and their interface: facts that plans and runs read, without torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
