"""Other placements of a scenario, ranked by what they hold, what they move and how many processes they start."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
