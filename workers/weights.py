"""Dense weights on the move, to rollouts and to files: in buckets of bounded bytes, never a whole model in one object.

A bucket is safetensors bytes of flat pieces, "start:name" -> values of the flattened tensor from `start` on; a tensor larger
than a bucket is cut. A reader writes buckets beside its model, in host memory, and takes them over when the last has come.
Files are safetensors and written piece by piece, byte for byte as that library writes them; nothing is a pickle.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nonet.errors import CheckpointError, StaleVersion
from nonet.models.generation import MEMORY_WEIGHTS, QUERY

BUCKET_BYTES = 64 << 20

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a flattened tensor."""

    name: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.start}:{self.name}"

    def of(self, named: Mapping[str, Tensor]) -> Tensor:
        """Its elements."""
        return named[self.name].reshape(-1)[self.start : self.stop]


Bucket = Sequence[Piece]


def buckets(named: Mapping[str, Tensor], most_bytes: int) -> list[Bucket]:
    """Tensors, in their order, as buckets of at most so many bytes. Only names, shapes and dtypes count: meta ones will do."""
    filled: list[list[Piece]] = []
    room = 0
    for name, tensor in named.items():
        width = tensor.element_size()
        longest = max(1, most_bytes // width)
        for start in range(0, tensor.numel(), longest):
            piece = Piece(name, start, min(start + longest, tensor.numel()))
            size = (piece.stop - start) * width
            if not filled or size > room:
                filled.append([])
                room = most_bytes
            filled[-1].append(piece)
            room -= size
    return [tuple(bucket) for bucket in filled]


def outline(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names, shapes and dtypes of tensors, as meta tensors."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}


def pack(bucket: Bucket, named: Mapping[str, Tensor]) -> bytes:
    """The pieces of a bucket as safetensors bytes."""
    pieces = {piece.key: piece.of(named) for piece in bucket}
    return b"".join([_header(pieces), *(_host_bytes(piece) for piece in pieces.values())])


def unpack(data: bytes) -> dict[str, Tensor]:
    """What `pack` packed: flat values by "start:name"."""
    from safetensors.torch import load

    return load(data)


class Incoming:
    """A version's weights on their way into a model: beside it, in host memory, until all are there."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._version: int | None = None
        self._shadow: dict[str, Tensor] = {}
        self._came: dict[str, int] = {}

    def take(self, version: int, bucket: bytes) -> None:
        """Write a bucket down; one of another version begins anew. Raises CheckpointError where it does not fit the model."""
        if version != self._version:
            self._begin(version)
        for key, values in unpack(bucket).items():
            start, _, name = key.partition(":")
            place = self._shadow.get(name, values[:0]).view(-1)[int(start) :][: len(values)]
            if len(place) != len(values):
                raise CheckpointError(
                    f"version {version}: {len(values)} weights at {start} of {name} do not fit this model"
                )
            place.copy_(values)
            self._came[key] = len(values)

    def swap(self, version: int) -> None:
        """Take the version over. Raises StaleVersion, with the model as it was, where some of it has not come."""
        expected = sum(tensor.numel() for tensor in self._model.state_dict().values())
        came = sum(self._came.values()) if version == self._version else 0
        if came != expected:
            raise StaleVersion(
                f"weights of version {version} are not whole: {came:,} of {expected:,} came; publish it again"
            )
        self._model.load_state_dict(self._shadow)
        self._version, self._shadow, self._came = None, {}, {}

    def _begin(self, version: int) -> None:
        self._version, self._came = version, {}
        self._shadow = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in self._model.state_dict().items()
        }


def host_copy(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are, in host memory of their own."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in named.items()
    }


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    """Tensors by name into one safetensors file; of those on a device a bucket at a time comes to the host."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for bucket in buckets(ordered, BUCKET_BYTES):
            for piece in bucket:
                file.write(_host_bytes(piece.of(ordered)))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote, mapped."""
    from safetensors.torch import load_file

    return load_file(path)


def load_model(model: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a commit's dense folder into a model. Raises CheckpointError when they do not fit."""
    load_weights(model, folder / "model.safetensors")


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Put the weights of a safetensors file into a model. Raises CheckpointError when they do not fit."""
    try:
        model.load_state_dict(_known(model, read_tensors(path)))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path.parent}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None


def _known(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a memory's weights only where the model has one: it can be added to a commit and taken away, and its
    voter by nearness with it."""
    own = model.state_dict()
    optional = (MEMORY_WEIGHTS, f"{QUERY}.weight")
    kept = {name: tensor for name, tensor in tensors.items() if name not in optional}
    for name in optional:
        if name in own:
            given = tensors.get(name)
            kept[name] = given if given is not None and given.shape == own[name].shape else own[name]
    return kept


def _header(named: Mapping[str, Tensor]) -> bytes:
    """The head of safetensors whose values follow in this order."""
    entries, end = {}, 0
    for name, tensor in named.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _host_bytes(flat: Tensor) -> bytes:
    """A copy. Not by way of NumPy: memory that it has seen cannot be given back when a role is offloaded."""
    host = flat.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes) if host.numel() else b""
