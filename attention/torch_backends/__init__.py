"""Attention without Triton: torch's fused kernel on tiles, a chunked form, torch_npu, and a reference."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
