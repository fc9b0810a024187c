"""Benches of serving: the cost and gain of merging, versions and the services around an engine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
