"""Dense weights on the move, to rollouts and to files: in buckets of bounded bytes, never a whole model in one object.

A bucket is safetensors bytes of flat pieces, "start:name" -> values of the flattened tensor from `start` on; a tensor larger
than a bucket is cut. It carries its version, the version it is a change of, and a checksum. A reader keeps the buckets where
they lie, in Ray's store, and copies them into its model when the last has come: it never computes with half a version, and
holds no second model. `delta`: of a version whose readers have the one before, blocks that changed alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.errors import CheckpointError, StaleVersion

BUCKET_BYTES = 64 << 20
_NO_SUM = "0" * 32

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
class TensorPiece:
    """Elements [start, stop) of a flattened tensor."""

    name: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.start}:{self.name}"

    def select_from(self, named: Mapping[str, Tensor]) -> Tensor:
        """Its elements."""
        return named[self.name].reshape(-1)[self.start : self.stop]


Bucket = Sequence[TensorPiece]


def plan_buckets(named: Mapping[str, Tensor], max_bytes: int) -> list[Bucket]:
    """Tensors, in their order, as buckets of at most so many bytes. Only names, shapes and dtypes count: meta ones will do."""
    filled: list[list[TensorPiece]] = []
    room = 0
    for name, tensor in named.items():
        width = tensor.element_size()
        longest = max(1, max_bytes // width)
        for start in range(0, tensor.numel(), longest):
            piece = TensorPiece(name, start, min(start + longest, tensor.numel()))
            size = (piece.stop - start) * width
            if not filled or size > room:
                filled.append([])
                room = max_bytes
            filled[-1].append(piece)
            room -= size
    return [tuple(bucket) for bucket in filled]


def to_meta_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names, shapes and dtypes of tensors, as meta tensors."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}


def pack(bucket: Bucket, named: Mapping[str, Tensor], **facts: str) -> np.ndarray:
    """The pieces of a bucket as safetensors bytes [B] uint8, with facts and a checksum in their header."""
    pieces = {piece.key: piece.select_from(named) for piece in bucket}
    head = build_header(pieces, {**facts, "sum": _NO_SUM})
    data = np.empty(len(head) + sum(piece.nbytes for piece in pieces.values()), np.uint8)
    at = len(head)
    for piece in pieces.values():
        host = piece.detach().cpu().contiguous()  # not by way of NumPy: an offload gives this memory back
        ctypes.memmove(data.ctypes.data + at, host.data_ptr(), host.nbytes)
        at += host.nbytes
    head = head.replace(_NO_SUM.encode(), _hash_values(data[len(head) :]).encode(), 1)
    data[: len(head)] = np.frombuffer(head, np.uint8)
    return data


@dataclass(frozen=True, slots=True)
class UnpackedBucket:
    """A bucket that came: its facts, and by "start:name" the type and the bytes of values, where they lie."""

    facts: Mapping[str, str]
    pieces: Mapping[str, tuple[str, np.ndarray]]


def unpack(data: np.ndarray) -> UnpackedBucket:
    """What `pack` packed. Raises CheckpointError where its bytes are not those that were sent."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    entries = json.loads(data[8 : 8 + size].tobytes())
    facts, values = entries.pop("__metadata__", {}), data[8 + size :]
    if facts.get("sum") != _hash_values(values):
        raise CheckpointError(
            f"a bucket of version {facts.get('version', '?')} came with other bytes than were sent; publish it again"
        )
    pieces = {key: (entry["dtype"], values[slice(*entry["data_offsets"])]) for key, entry in entries.items()}
    return UnpackedBucket(facts, pieces)


class OutgoingWeights:
    """A trainer's side: buckets of its weights. `block_bytes` above 0: of a version whose readers have the one packed before,
    blocks of so many bytes that changed since then, told by their checksums."""

    def __init__(self, named: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES, block_bytes: int = 0):
        self.buckets = plan_buckets(named, bucket_bytes)
        self._block_bytes = block_bytes
        self._before: tuple[int | None, dict[str, bytes]] = None, {}
        self._under_way: tuple[int | None, dict[str, bytes]] = None, {}

    def list_tensor_names(self, number: int) -> list[str]:
        """The tensors that a bucket has pieces of."""
        return list(dict.fromkeys(piece.name for piece in self.buckets[number]))

    def pack_bucket(
        self, number: int, named: Mapping[str, Tensor], version: int = 0, base: int | None = None
    ) -> np.ndarray:
        """A bucket of a version; `base`: what its readers have. All of it, where that is not the version before."""
        facts = {"version": str(version), "number": str(number), "of": str(len(self.buckets))}
        if not self._block_bytes:
            return pack(self.buckets[number], named, **facts)
        if version != self._under_way[0]:
            self._before, self._under_way = self._under_way, (version, {})
        known = self._before[1] if base is not None and base == self._before[0] else None
        changed = list(self._iterate_changed(self.buckets[number], named, known))
        if known is not None:
            facts["base"] = str(base)
        return pack(changed, named, **facts)

    def _iterate_changed(
        self, bucket: Bucket, named: Mapping[str, Tensor], known: Mapping[str, bytes] | None
    ) -> Iterator[TensorPiece]:
        """The blocks of a bucket whose bytes are not those that are known; all of them where nothing is."""
        for piece in bucket:
            values = piece.select_from(named).detach().cpu().contiguous()
            step = max(1, self._block_bytes // values.element_size())
            for start in range(0, len(values), step):
                block = values[start : start + step]
                part = TensorPiece(piece.name, piece.start + start, piece.start + start + len(block))
                self._under_way[1][part.key] = digest = hashlib.blake2b(
                    _view_bytes(block), digest_size=16
                ).digest()
                if known is None or known.get(part.key) != digest:
                    yield part


class IncomingWeights:
    """A version's weights on their way into a model: the buckets as they came, until all are there. `version`: the one that
    the model has, None before the first."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.version: int | None = None
        self._coming: int | None = None
        self._buckets: dict[Any, UnpackedBucket] = {}

    def take(self, version: int, bucket: np.ndarray) -> None:
        """Keep a bucket; one of another version begins anew. Raises CheckpointError where it is torn or does not fit the model,
        StaleVersion where it is a change of a version that is not here."""
        packed = unpack(bucket)
        base = packed.facts.get("base")
        if base is not None and int(base) != self.version:
            raise StaleVersion(
                f"version {version} is a change of version {base}, here is {self.version}: publish it whole"
            )
        if version != self._coming:
            self._coming, self._buckets = version, {}
        own = self._model.state_dict()
        for key, (dtype, values) in packed.pieces.items():
            start, _, name = key.partition(":")
            tensor = own.get(name)
            width = tensor.element_size() if tensor is not None else 1
            if (
                tensor is None
                or dtype != _DTYPES[tensor.dtype]
                or int(start) + len(values) // width > tensor.numel()
            ):
                raise CheckpointError(
                    f"version {version}: {len(values) // width} weights at {start} of {name} do not fit this model"
                )
        self._buckets[packed.facts.get("number", tuple(packed.pieces))] = packed

    def swap(self, version: int) -> None:
        """Take the version over. Raises StaleVersion, with the model as it was, where some of it has not come."""
        own = self._model.state_dict()
        buckets = self._buckets.values() if version == self._coming else ()
        came = sum(len(values) for packed in buckets for _, values in packed.pieces.values())
        expected = sum(tensor.nbytes for tensor in own.values())
        of = next((int(packed.facts["of"]) for packed in buckets if "base" in packed.facts), 0)
        if (came != expected) if not of else (len(buckets) != of):
            raise StaleVersion(
                f"weights of version {version} are not whole: {came:,} of {expected:,} bytes came; publish it again"
                if not of
                else f"weights of version {version} are not whole: {len(buckets)} of {of} buckets came; publish it again"
            )
        for packed in buckets:
            for key, (_, values) in packed.pieces.items():
                start, _, name = key.partition(":")
                _copy_bytes(own[name], int(start), values)
        self.version, self._coming, self._buckets = version, None, {}


def _copy_bytes(tensor: Tensor, start: int, values: np.ndarray) -> None:
    """Bytes into a tensor, from its element `start` on."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr() + start * tensor.element_size(), values.ctypes.data, len(values))
        return
    given = torch.frombuffer(bytearray(values), dtype=tensor.dtype)
    if tensor.is_contiguous():
        tensor.view(-1)[start : start + len(given)].copy_(given)
        return
    whole = tensor.reshape(-1)
    whole[start : start + len(given)].copy_(given)
    tensor.copy_(whole.view_as(tensor))


def copy_to_host(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are, in host memory of their own."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in named.items()
    }


def build_header(named: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> bytes:
    """The head of safetensors whose values follow in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in named.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _view_bytes(host: Tensor) -> Any:
    """The memory of a tensor on the host, where it lies."""
    return (ctypes.c_char * host.nbytes).from_address(host.data_ptr())


def _hash_values(values: np.ndarray) -> str:
    return hashlib.blake2b(values.data, digest_size=16).hexdigest()
