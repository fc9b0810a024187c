"""All names that a plug-in needs: the interfaces of replaceable parts, and shipped implementations to build on.

A plug-in imports from this module alone. Names are loaded on first use, so importing it loads neither torch nor Ray.
docs/how-to/extend.md shows one plug-in of each kind.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("nonet", __file__)  # pyright: ignore[reportUnknownVariableType]
