"""The shipped kinds of roles, one file per kind, with the facts that plans and runs need."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
