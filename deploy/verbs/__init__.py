"""Verbs of the command line that are more than one line: about runs, and about serving."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
