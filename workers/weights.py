"""Dense weights in transit, to rollouts and to files: in buckets of bounded size, never a whole model in one object.

A bucket is a safetensors buffer of flat pieces: "start:name" maps to the values of the flattened tensor from `start`
on; a tensor that is larger than a bucket is cut. The header of a bucket has its version, its base (the version that it
is a delta of), and a checksum. A reader keeps the buckets where they are, in Ray's object store, and copies them into
its model when the last has arrived. So it never computes with half a version and holds no second model. A delta has
only the blocks (pieces of fixed size) that changed since the version that its readers have.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nonet.errors import CheckpointError, StaleVersion

_Value = TypeVar("_Value")
BUCKET_BYTES = 64 << 20
_NO_CHECKSUM = (
    "0" * 32
)  # Stands in a header for the checksum, which has as many digits, until the values are written.

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


def batch_by_size(
    values: Iterable[_Value], get_size: Callable[[_Value], int], max_size: int
) -> Iterator[list[_Value]]:
    """Yield batches of consecutive values of at most `max_size` together, or of one value that is larger.

    Args:
        values: The values.
        get_size: Returns the size of a value, such as its bytes or elements.
        max_size: Largest size of a batch.
    """
    batch: list[_Value] = []
    batch_size = 0
    for value in values:
        size = get_size(value)
        if batch and batch_size + size > max_size:
            yield batch
            batch, batch_size = [], 0
        batch.append(value)
        batch_size += size
    if batch:
        yield batch


def plan_buckets(named: Mapping[str, Tensor], max_bytes: int) -> list[Bucket]:
    """Divide tensors, in their order, into buckets of bounded size.

    Args:
        named: Tensors by name; only names, shapes and dtypes are used, so meta tensors suffice.
        max_bytes: Largest size of a bucket in bytes.
    """
    buckets: list[list[TensorPiece]] = []
    free_bytes = 0  # In the last bucket.
    for name, tensor in named.items():
        max_elements = max(1, max_bytes // tensor.element_size())
        for start in range(0, tensor.numel(), max_elements):
            piece = TensorPiece(name, start, min(start + max_elements, tensor.numel()))
            piece_bytes = (piece.stop - start) * tensor.element_size()
            if not buckets or piece_bytes > free_bytes:
                buckets.append([])
                free_bytes = max_bytes
            buckets[-1].append(piece)
            free_bytes -= piece_bytes
    return [tuple(bucket) for bucket in buckets]


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
    header = build_header(pieces, {**facts, "sum": _NO_CHECKSUM})
    data = np.empty(len(header) + sum(piece.nbytes for piece in pieces.values()), np.uint8)
    offset = len(header)
    for piece in pieces.values():
        host = piece.detach().cpu().contiguous()  # Without NumPy, so that an offload can release this memory.
        ctypes.memmove(data.ctypes.data + offset, host.data_ptr(), host.nbytes)
        offset += host.nbytes
    checksum = _hash_values(data[len(header) :])
    data[: len(header)] = np.frombuffer(header.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1), np.uint8)
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
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    entries = json.loads(data[8 : 8 + header_bytes].tobytes())
    facts, values = entries.pop("__metadata__", {}), data[8 + header_bytes :]
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
        block_bytes: Size of the blocks of deltas, whose changes are found by checksums; 0 to pack whole buckets only.
    """

    def __init__(self, named: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES, block_bytes: int = 0):
        self.buckets = plan_buckets(named, bucket_bytes)
        self._block_bytes = block_bytes
        # Of the previous version and of the one that is being packed: its number and the digest of each block.
        self._previous: tuple[int | None, dict[str, bytes]] = None, {}
        self._current: tuple[int | None, dict[str, bytes]] = None, {}

    def list_tensor_names(self, number: int) -> list[str]:
        """Return the names of the tensors that a bucket, given by its index, has pieces of."""
        return list(dict.fromkeys(piece.name for piece in self.buckets[number]))

    def pack_bucket(
        self, number: int, named: Mapping[str, Tensor], version: int = 0, base: int | None = None
    ) -> np.ndarray:
        """Pack a bucket of a version.

        Args:
            number: Index of the bucket.
            named: At least the tensors that the bucket has pieces of.
            version: Version of the weights.
            base: Version that the readers have. A delta is packed if it is the previous version, else the whole bucket.

        Returns:
            The bytes of the bucket [B] uint8.
        """
        facts = {"version": str(version), "number": str(number), "of": str(len(self.buckets))}
        if not self._block_bytes:
            return pack(self.buckets[number], named, **facts)
        if version != self._current[0]:
            self._previous, self._current = self._current, (version, {})
        base_digests = self._previous[1] if base is not None and base == self._previous[0] else None
        changed = list(self._record_and_select_changed(self.buckets[number], named, base_digests))
        if base_digests is not None:
            facts["base"] = str(base)
        return pack(changed, named, **facts)

    def _record_and_select_changed(
        self, bucket: Bucket, named: Mapping[str, Tensor], base_digests: Mapping[str, bytes] | None
    ) -> Iterator[TensorPiece]:
        """Record the digests of a bucket's blocks, and yield those that differ from the base; all blocks without a base."""
        for piece in bucket:
            values = piece.select_from(named).detach().cpu().contiguous()
            block_elements = max(1, self._block_bytes // values.element_size())
            for start in range(0, len(values), block_elements):
                block = values[start : start + block_elements]
                block_piece = TensorPiece(piece.name, piece.start + start, piece.start + start + len(block))
                digest = hashlib.blake2b(_view_bytes(block), digest_size=16).digest()
                self._current[1][block_piece.key] = digest
                if base_digests is None or base_digests.get(block_piece.key) != digest:
                    yield block_piece


class IncomingWeights:
    """The received buckets of a version, kept until all have arrived and are copied into the model.

    Attributes:
        version: The version that the model has, None before the first.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.version: int | None = None
        self._incoming_version: int | None = None
        self._buckets: dict[
            Any, UnpackedBucket
        ] = {}  # By index; by its pieces, for a bucket that does not say its index.

    def take(self, version: int, bucket: np.ndarray) -> None:
        """Keep a bucket. If it is the first of a version, drop the buckets of other versions.

        Raises:
            CheckpointError: The bucket is damaged or does not fit the model.
            StaleVersion: The bucket is a delta of a version that is not the model's.
        """
        unpacked = unpack(bucket)
        base = unpacked.facts.get("base")
        if base is not None and int(base) != self.version:
            raise StaleVersion(
                f"version {version} is a change of version {base}, here is {self.version}: publish it whole"
            )
        if version != self._incoming_version:
            self._incoming_version, self._buckets = version, {}
        state = self._model.state_dict()
        for key, (dtype, values) in unpacked.pieces.items():
            start, _, name = key.partition(":")
            tensor = state.get(name)
            elements = len(values) // (tensor.element_size() if tensor is not None else 1)
            if tensor is None or dtype != _DTYPES[tensor.dtype] or int(start) + elements > tensor.numel():
                raise CheckpointError(
                    f"version {version}: {elements} weights at {start} of {name} do not fit this model"
                )
        self._buckets[unpacked.facts.get("number", tuple(unpacked.pieces))] = unpacked

    def swap(self, version: int) -> None:
        """Copy the buckets of a version into the model.

        Raises:
            StaleVersion: Some buckets have not arrived; the model is unchanged.
        """
        state = self._model.state_dict()
        buckets = self._buckets.values() if version == self._incoming_version else ()
        arrived_bytes = sum(len(values) for bucket in buckets for _, values in bucket.pieces.values())
        model_bytes = sum(tensor.nbytes for tensor in state.values())
        # A delta has fewer bytes than the model, so its buckets are counted instead; 0 for whole weights.
        delta_buckets = next((int(bucket.facts["of"]) for bucket in buckets if "base" in bucket.facts), 0)
        if (arrived_bytes != model_bytes) if not delta_buckets else (len(buckets) != delta_buckets):
            arrived = (
                f"{len(buckets)} of {delta_buckets} buckets"
                if delta_buckets
                else f"{arrived_bytes:,} of {model_bytes:,} bytes"
            )
            raise StaleVersion(
                f"weights of version {version} are not whole: {arrived} came; publish it again"
            )
        for bucket in buckets:
            for key, (_, values) in bucket.pieces.items():
                start, _, name = key.partition(":")
                _copy_bytes(state[name], int(start), values)
        self.version, self._incoming_version, self._buckets = version, None, {}


def _copy_bytes(tensor: Tensor, start: int, values: np.ndarray) -> None:
    """Copy the bytes of values into a tensor, from its element `start` on."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr() + start * tensor.element_size(), values.ctypes.data, len(values))
        return
    elements = torch.frombuffer(bytearray(values), dtype=tensor.dtype)
    if tensor.is_contiguous():
        tensor.view(-1)[start : start + len(elements)].copy_(elements)
        return
    flat_copy = tensor.reshape(-1)
    flat_copy[start : start + len(elements)].copy_(elements)
    tensor.copy_(flat_copy.view_as(tensor))


def copy_to_host(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into host memory."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in named.items()
    }


def build_header(named: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> bytes:
    """Return the safetensors header, with its length, for the values of tensors that follow it in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in named.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # The values are aligned to 8 bytes.
    return struct.pack("<Q", len(text)) + text


def _view_bytes(host: Tensor) -> Any:
    """Return the memory of a host tensor without a copy."""
    return (ctypes.c_char * host.nbytes).from_address(host.data_ptr())


def _hash_values(values: np.ndarray) -> str:
    return hashlib.blake2b(values.data, digest_size=16).hexdigest()
