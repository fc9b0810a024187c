"""`nonet chaos`: runs a scenario undisturbed and with faults, and compares both runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
