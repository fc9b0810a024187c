"""The baselines that a recommender is compared with: what they compute, and how those of users are checked."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
