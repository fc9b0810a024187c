"""Runs on a cluster that is reached through its dashboard: submitting, listing, following and stopping them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
