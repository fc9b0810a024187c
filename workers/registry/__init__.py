"""The registry of a run: published versions, by checksum, and which of them are served."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
