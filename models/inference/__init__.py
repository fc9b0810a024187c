"""Inference: questions of many callers answered as one batch, each as if it had been asked alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
