"""The recommendation service: from requests to answers of versions, in one process or several."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
