"""The arguments of one attention call: its tensors, lengths, mask and bias."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
