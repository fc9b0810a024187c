"""The baselines that a recommender is compared with: popularity, a counter of transitions, and SASRec."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
