"""Rewards: the interface, the checks of what they return, the shipped ones."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
