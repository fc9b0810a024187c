"""What a recommender must beat, a file each: popularity, a counter of transitions, and SASRec, which is trained."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
