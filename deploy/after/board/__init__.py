"""`nonet board`: the same protocols over many data sets, with baselines, seeds and published results in one page."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
