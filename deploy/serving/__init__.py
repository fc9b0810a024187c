"""Serving: a finished run behind an address, its versions, its answers to whole tables of users."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
