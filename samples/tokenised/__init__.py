"""Tokenised sequences in a store: a user's events and their semantic ids by the user's id."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
