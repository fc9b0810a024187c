"""What a model's author uses: embedding collections, features and table options."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
