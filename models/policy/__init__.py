"""What a policy draws from a catalogue, and what it expects of it exactly."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
