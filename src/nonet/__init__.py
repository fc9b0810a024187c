"""Nonet: generative recommendation from click logs to reinforcement learning, with one controller on Ray.

Every public name is importable from here and is loaded on first use: `import nonet` imports neither torch nor Ray.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]
