"""Preparation of a run before its first step: checks, files, settings of workers, and a warm start."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
