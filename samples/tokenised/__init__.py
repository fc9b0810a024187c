"""The item table among the artifacts of a run, and tokenised sequences in a store by the user's id."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
