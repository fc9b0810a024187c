"""StoredTensors: reading of named tensors from a safetensors file, or from several files and their index.

An index is a JSON file in one of two forms:

    {"weight_map": {name: file}}                                                     whole tensors, as Hugging Face's files
    {"files": [file], "tensors": {name: {"shape": [..], "slices": [[n, start, shape]]}}}    file n has this slice of a tensor

The name of a slice in its file is `TensorSlice.key`. The slices of a tensor do not overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangular part of a tensor.

    Attributes:
        name: Name of the tensor.
        start: Index of its first element in each dimension.
        shape: Its shape.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in a file: "start,start:name"."""
        return f"{','.join(map(str, self.start))}:{self.name}"

    @property
    def stop(self) -> tuple[int, ...]:
        """The index past its last element in each dimension."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    def select_from(self, tensor: Tensor, origin: Sequence[int] = ()) -> Tensor:
        """Return the elements of this slice as a view.

        Args:
            tensor: The whole tensor, or a slice of it that has all these elements.
            origin: The start of that slice.
        """
        origin = origin or (0,) * len(self.start)
        ranges = zip(self.start, self.stop, origin, strict=True)
        return tensor[tuple(slice(start - first, stop - first) for start, stop, first in ranges)]

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the elements that are in both slices of a tensor; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(
            stop - first for stop, first in zip(map(min, self.stop, other.stop), start, strict=True)
        )
        return TensorSlice(self.name, start, shape) if all(size > 0 for size in shape) else None


class StoredTensors(Mapping[str, "Tensor"]):
    """The tensors of a safetensors file, or of the files that its index names; each is read when it is asked for.

    Args:
        path: The path of the file, from which the path of the index is derived.

    Raises:
        CheckpointError: A file or a tensor is missing.
    """

    def __init__(self, path: Path):
        index_path = path.with_name(f"{path.name}.index.json")
        self._folder, self._open = path.parent, cache(_open)
        # By name, the file, its key there, and the slice; None for a whole tensor.
        self._stored: dict[str, list[tuple[Path, str, TensorSlice | None]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}  # Of the tensors that are stored in slices.
        if path.exists():
            self._add_whole_tensors([path])
            return
        if not index_path.exists():
            raise CheckpointError(f"there is no {path}, and no {index_path.name}")
        index = json.loads(index_path.read_text(encoding="utf-8"))
        files = [
            self._folder / name for name in index.get("files") or sorted(set(index["weight_map"].values()))
        ]
        for file in files:
            if not file.exists():
                raise CheckpointError(f"{index_path} names {file.name}, which is not there")
        if "weight_map" in index:
            self._add_whole_tensors(files)
            missing = sorted(index["weight_map"].keys() - self._stored.keys())
        else:
            for name, tensor in index["tensors"].items():
                self._shapes[name] = tuple(tensor["shape"])
                slices = tensor["slices"]
                parts = [
                    (files[n], TensorSlice(name, tuple(start), tuple(shape))) for n, start, shape in slices
                ]
                self._stored[name] = [(file, part.key, part) for file, part in parts]
            keys = {file: set(self._open(file).keys()) for file in files}
            entries = [(name, file, key) for name, stored in self._stored.items() for file, key, _ in stored]
            missing = [name for name, file, key in entries if key not in keys[file]]
        if missing:
            raise CheckpointError(
                f"{self._folder}: the shards lack {missing[0]}, which {index_path.name} names"
            )

    def _add_whole_tensors(self, files: Sequence[Path]) -> None:
        """Add the tensors of files, each of which is whole in one of them."""
        for file in files:
            self._stored |= {name: [(file, name, None)] for name in self._open(file).offset_keys()}

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        if name in self._shapes:
            return self._shapes[name]
        file, key, _ = self._stored[name][0]
        return tuple(self._open(file).get_slice(key).get_shape())

    def describe(self) -> dict[str, Tensor]:
        """Return meta tensors of the names, shapes and dtypes of the whole tensors, whose values are not read."""
        import torch

        mapped = {
            name: self._open(stored[0][0]).get_tensor(stored[0][1]) for name, stored in self._stored.items()
        }
        return {
            name: torch.empty(self.get_shape(name), dtype=tensor.dtype, device="meta")
            for name, tensor in mapped.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole tensor, memory-mapped if it is stored whole."""
        shape = self.get_shape(name)
        return self.read_slice(TensorSlice(name, (0,) * len(shape), shape))

    def read_slice(self, wanted: TensorSlice) -> Tensor:
        """Read a part of a tensor, memory-mapped if it is part of one stored slice.

        Raises:
            CheckpointError: Some of its elements are not stored.
        """
        import torch

        result: Tensor | None = None
        missing_elements = math.prod(wanted.shape)
        for file, key, part in self._stored[wanted.name]:
            origin = part.start if part else ()
            shared = wanted.intersect(part) if part and math.prod(wanted.shape) else wanted
            if shared is None:
                continue
            values = shared.select_from(self._open(file).get_tensor(key), origin)
            if shared == wanted:
                return values
            if result is None:
                result = torch.empty(wanted.shape, dtype=values.dtype)
            shared.select_from(result, wanted.start).copy_(values)
            missing_elements -= values.numel()
            if not missing_elements:
                return result
        raise CheckpointError(f"{self._folder}: {missing_elements} elements of {wanted.name} are not there")

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of the files."""
        return iter(self._stored)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._stored)


def _open(file: Path) -> Any:
    """Open a safetensors file; its tensors are mapped into memory when they are read."""
    from safetensors import safe_open

    return safe_open(file, framework="pt")
