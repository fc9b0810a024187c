"""How tensors cross between processes: as NumPy arrays, so that pools may run different versions of torch.

`speak` teaches Ray's serializer once a process; then a tensor anywhere in an argument or a result travels as dtype name and
array, without a copy on the sending side. Arrow and NumPy travel as Ray sends them. No pickled torch object is on the wire.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_spoken: list[bool] = []


def speak() -> None:
    """Register the tensor format with Ray, once torch is loaded; cheap to call often."""
    if _spoken or "torch" not in sys.modules:
        return
    import ray
    import torch

    if not hasattr(torch, "nn"):  # torch is still being imported on another thread
        return
    for kind in (torch.Tensor, torch.nn.Parameter):
        ray.util.register_serializer(kind, serializer=to_wire, deserializer=from_wire)
    _spoken.append(True)


def to_wire(tensor: Any) -> tuple[str, np.ndarray]:
    """(dtype name, array) of a tensor; bfloat16 and other types that NumPy lacks go as their bytes. Detached, on the host."""
    import torch

    if tensor.layout != torch.strided:
        raise TypeError(
            f"a {tensor.layout} tensor cannot go to another worker; send its indices and values, or to_dense()"
        )
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return name, tensor.numpy()
    except TypeError:
        plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return name, tensor.view(plain).numpy()


def from_wire(parts: tuple[str, np.ndarray]) -> Any:
    """The tensor; a copy, since what Ray hands out is read-only memory shared with others."""
    import torch

    name, array = parts
    tensor = torch.from_numpy(np.array(array, copy=True))
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
