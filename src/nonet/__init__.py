"""Nonet: generative recommendation from clicks to reinforcement learning, under one controller on Ray.

Everything public is here and loaded on first use: `import nonet` loads neither torch nor Ray.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]
