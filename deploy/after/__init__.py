"""Questions after a run: compared with another one, evaluated on other data, over several seeds."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
