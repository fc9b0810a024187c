"""Sequences: a row a user, in time's order, with splits and the policy on repeats."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
