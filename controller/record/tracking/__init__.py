"""The metrics and events of a run while it works, and the programs that show them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
