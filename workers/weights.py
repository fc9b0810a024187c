"""Dense weights in transit, to rollouts and to files: in buckets of bounded size, never a whole model in one object.

A bucket is a safetensors buffer of flat pieces: "start:name" maps to the values of the flattened tensor from `start`
on; a tensor that is larger than a bucket is cut. A bucket carries its version, the version that it is a delta of, and
a checksum. A reader keeps the buckets where they are, in Ray's object store, and copies them into its model when the
last has arrived. So it never computes with half a version and holds no second model. A delta has only the blocks that
changed since the version that its readers have.
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
        """The name of the piece in a bucket: "start:name"."""
        return f"{self.start}:{self.name}"

    def select_from(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return the elements of this piece."""
        return named[self.name].reshape(-1)[self.start : self.stop]


Bucket = Sequence[TensorPiece]


def plan_buckets(named: Mapping[str, Tensor], max_bytes: int) -> list[Bucket]:
    """Divide tensors, in their order, into buckets of bounded size.

    Args:
        named: Tensors by name; only names, shapes and dtypes are used, so meta tensors suffice.
        max_bytes: Largest size of a bucket in bytes.
    """
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
    """Return meta tensors of the same names, shapes and dtypes."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()}


def pack(bucket: Bucket, named: Mapping[str, Tensor], **facts: str) -> np.ndarray:
    """Serialise the pieces of a bucket.

    Args:
        bucket: The pieces.
        named: The tensors that the pieces are taken from.
        **facts: Text fields of the header, such as the version.

    Returns:
        Safetensors bytes [B] uint8 with the facts and a checksum in their header.
    """
    pieces = {piece.key: piece.select_from(named) for piece in bucket}
    head = build_header(pieces, {**facts, "sum": _NO_SUM})
    data = np.empty(len(head) + sum(piece.nbytes for piece in pieces.values()), np.uint8)
    at = len(head)
    for piece in pieces.values():
        host = piece.detach().cpu().contiguous()  # without NumPy, so that an offload can release this memory
        ctypes.memmove(data.ctypes.data + at, host.data_ptr(), host.nbytes)
        at += host.nbytes
    head = head.replace(_NO_SUM.encode(), _hash_values(data[len(head) :]).encode(), 1)
    data[: len(head)] = np.frombuffer(head, np.uint8)
    return data


@dataclass(frozen=True, slots=True)
class UnpackedBucket:
    """A bucket that was received.

    Attributes:
        facts: Text fields of its header.
        pieces: By "start:name", the dtype and the bytes of the values, as views of the buffer.
    """

    facts: Mapping[str, str]
    pieces: Mapping[str, tuple[str, np.ndarray]]


def unpack(data: np.ndarray) -> UnpackedBucket:
    """Read a bucket that `pack` made.

    Raises:
        CheckpointError: The bytes do not match the checksum.
    """
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
    """The buckets of a trainer's weights.

    Args:
        named: Tensors by name, such as meta tensors.
        bucket_bytes: Largest size of a bucket in bytes.
        block_bytes: If above 0, a version whose readers have the one packed before it is sent as the changed blocks
            of this size only. Changes are found by checksums.
    """

    def __init__(self, named: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES, block_bytes: int = 0):
        self.buckets = plan_buckets(named, bucket_bytes)
        self._block_bytes = block_bytes
        self._before: tuple[int | None, dict[str, bytes]] = None, {}
        self._under_way: tuple[int | None, dict[str, bytes]] = None, {}

    def list_tensor_names(self, number: int) -> list[str]:
        """Return the names of the tensors that a bucket has pieces of."""
        return list(dict.fromkeys(piece.name for piece in self.buckets[number]))

    def pack_bucket(
        self, number: int, named: Mapping[str, Tensor], version: int = 0, base: int | None = None
    ) -> np.ndarray:
        """Pack a bucket of a version.

        Args:
            number: Number of the bucket.
            named: At least the tensors that the bucket has pieces of.
            version: Version of the weights.
            base: Version that the readers have. The whole bucket is packed unless it is the version packed before.
        """
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
        """Yield the blocks of a bucket whose digests differ from the known ones, all blocks where none are known."""
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
    """The buckets of a version on their way into a model, kept until all have arrived.

    Attributes:
        version: The version that the model has, None before the first.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.version: int | None = None
        self._coming: int | None = None
        self._buckets: dict[Any, UnpackedBucket] = {}

    def take(self, version: int, bucket: np.ndarray) -> None:
        """Keep a bucket; a bucket of another version drops those kept before.

        Raises:
            CheckpointError: The bucket is damaged or does not fit the model.
            StaleVersion: The bucket is a delta of a version that is not the model's.
        """
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
        """Copy the buckets of a version into the model.

        Raises:
            StaleVersion: Some buckets have not arrived; the model is unchanged.
        """
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
    """Copy bytes into a tensor, from its element `start` on."""
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
    """Copy tensors into host memory."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in named.items()
    }


def build_header(named: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> bytes:
    """Return the safetensors header for values that follow in this order."""
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
    """Return the memory of a host tensor without a copy."""
    return (ctypes.c_char * host.nbytes).from_address(host.data_ptr())


def _hash_values(values: np.ndarray) -> str:
    return hashlib.blake2b(values.data, digest_size=16).hexdigest()
