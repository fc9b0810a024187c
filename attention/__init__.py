"""UniAttention: one attention operator for the masks of recommendation models, on every supported device."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
