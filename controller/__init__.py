"""The controller: makes a plan from a scenario, and executes the run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
