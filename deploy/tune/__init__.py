"""`nonet tune`: search a scenario's keys for the best validation, on Ray Tune with Optuna."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
