"""The shipped kinds of roles, a file each: facts that plans and runs read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
