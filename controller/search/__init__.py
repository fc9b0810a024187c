"""Search over placements of a scenario, ranked by memory, traffic and number of processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
