"""A session: the calls that a training loop makes to run the stages of a scenario."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
