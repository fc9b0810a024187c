"""The controller: from a scenario to a plan, and from a plan to a run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
