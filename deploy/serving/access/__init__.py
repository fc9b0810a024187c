"""Access control: tokens, rate limits, and the circuit breaker."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
