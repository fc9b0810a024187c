"""What click models share: their labels, baselines, metrics, and the model of a checkpoint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
