"""`nonet tune`: search a scenario's keys for the best validation with Ray Tune and Optuna."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
