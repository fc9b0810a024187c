"""The files of a run: its folder, checkpoints, journal, commands, metrics, validations and trace."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
