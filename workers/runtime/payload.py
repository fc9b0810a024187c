"""Rows of payloads: counting, slicing and concatenating them, and the format of tensors between processes.

Supported are lists, tuples, NumPy arrays, torch tensors, Arrow tables, `Jagged`, and dicts of those with equal row
counts. The order of rows is kept and nothing is padded. torch and Arrow are recognised by their methods and not
imported.

Tensors are sent between processes as NumPy arrays, so that pools may run different versions of torch.
`register_tensor_serializer` registers this format with Ray's serializer once in each process; then a tensor anywhere
in an argument or a result is sent as dtype name and array, without a copy on the sending side. Ray's own serializer
sends Arrow tables and NumPy arrays. No pickled torch object is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.types import Jagged


def is_collection(value: Any) -> bool:
    """Return whether a value has rows, so that a group call must say how to distribute it (`Shard`, `Replicate`, `PerRank`)."""
    return isinstance(value, list | tuple | dict | set | Jagged) or (
        hasattr(value, "shape") and bool(getattr(value, "shape", ()))
    )


def count_rows(value: Any) -> int:
    """Return the number of rows of a value.

    Raises:
        ConfigError: The value has no rows, or the parts of a dict have different row counts.
    """
    if isinstance(value, dict):
        counts = {key: count_rows(part) for key, part in value.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(
                f"cannot shard a dict whose parts have different row counts: {counts}; use PerRank, or make the counts equal"
            )
        return next(iter(counts.values()), 0)
    if hasattr(value, "num_rows"):
        return value.num_rows
    try:
        return len(value)
    except TypeError:
        raise ConfigError(
            f"cannot shard a {type(value).__name__}: it has no rows; use Replicate or PerRank"
        ) from None


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Return the rows [start, stop) of a value, as a view where the type allows it."""
    if isinstance(value, dict):
        return {key: slice_rows(part, start, stop) for key, part in value.items()}
    if isinstance(value, Jagged):
        low, high = int(value.offsets[start]), int(value.offsets[stop])
        return Jagged(value.values[low:high], value.offsets[start : stop + 1] - low)
    if hasattr(value, "num_rows"):
        return value.slice(start, stop - start)
    return value[start:stop]


def split_evenly(total: int, world: int) -> list[tuple[int, int]]:
    """Return the range [start, stop) of each rank. The first ranks get one more if needed: 5 rows over 4 ranks are 2, 1, 1, 1."""
    base, extra = divmod(total, world)
    starts = [rank * base + min(rank, extra) for rank in range(world + 1)]
    return list(pairwise(starts))


def concat_rows(parts: Sequence[Any]) -> Any:
    """Concatenate the results of all ranks in rank order.

    Raises:
        ConfigError: The results have no rows.
    """
    first = parts[0]
    if isinstance(first, list):
        return [row for part in parts for row in part]
    if isinstance(first, tuple):
        return tuple(row for part in parts for row in part)
    if isinstance(first, dict):
        return {key: concat_rows([part[key] for part in parts]) for key in first}
    if isinstance(first, Jagged):
        return _concat_jagged(parts)
    if hasattr(first, "num_rows"):
        import pyarrow as pa

        return pa.concat_tables(parts)
    if hasattr(first, "numpy") and hasattr(first, "device"):
        import torch

        return torch.cat(list(parts))
    if hasattr(first, "shape") and first.shape:
        return np.concatenate(parts)
    raise ConfigError(
        f"cannot concat results of type {type(first).__name__}: use collect='list', 'first', 'sum' or 'mean'"
    )


def _concat_jagged(parts: Sequence[Jagged]) -> Jagged:
    """Concatenate jagged arrays."""
    values = concat_rows([part.values for part in parts])
    lengths = concat_rows([part.offsets[1:] - part.offsets[:-1] for part in parts])
    head = parts[0].offsets[:1]  # The 0 before the first row, in the type of the offsets.
    return Jagged(values, concat_rows([head, head + lengths.cumsum(0)]))


_registered: list[bool] = []  # Not empty once this process has registered the tensor format.


def register_tensor_serializer() -> None:
    """Register the tensor format with Ray once torch is loaded. Does nothing after that, so it may be called often."""
    if _registered or "torch" not in sys.modules:
        return
    import ray
    import torch

    if not hasattr(torch, "nn"):  # Another thread is still importing torch.
        return
    for cls in (torch.Tensor, torch.nn.Parameter):
        ray.util.register_serializer(cls, serializer=to_wire, deserializer=from_wire)
    _registered.append(True)


def to_wire(tensor: Any) -> tuple[str, np.ndarray]:
    """Convert a tensor into (dtype name, host array); dtypes that NumPy lacks become integers of the same size."""
    import torch

    if tensor.layout != torch.strided:
        raise TypeError(
            f"cannot send a {tensor.layout} tensor to another worker: send its indices and values, or convert it with to_dense()"
        )
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return name, tensor.numpy()
    except TypeError:
        int_types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return name, tensor.view(int_types[tensor.element_size()]).numpy()


def from_wire(parts: tuple[str, np.ndarray]) -> Any:
    """Convert (dtype name, array) into a tensor. The array is copied, since Ray returns read-only arrays in shared memory."""
    import torch

    name, array = parts
    tensor = torch.from_numpy(np.array(array, copy=True))
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
