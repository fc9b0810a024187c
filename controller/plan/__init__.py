"""Plans: the placement of a scenario on a cluster view, with memory, work and notes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
