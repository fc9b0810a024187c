"""Writing of named tensors as safetensors files, split into several files with an index; `StoredTensors` reads them.

    model.safetensors                                                    if all tensors fit into one file
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json  otherwise

If several ranks have the whole tensors, each writes every n-th file, and the index is Hugging Face's. If they divide the
tensors, each writes files of its slices. A file is written piece by piece from the memory of its tensors. Writing needs no
additional host memory for tensors on the host, and that of one bucket for tensors on a device. Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import CheckpointError
from nonet.models.generation import MEMORY_WEIGHTS, QUERY, SIGNAL_WEIGHT
from nonet.stored_tensors import StoredTensors, TensorSlice
from nonet.workers.weights import (
    BUCKET_BYTES,
    batch_by_size,
    build_header,
    copy_to_host,
    plan_buckets,
    to_meta_tensors,
)

SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a state is saved.

    Attributes:
        copy: Whether tensors that later steps change are copied first; False if no step runs until the files are
            written.
        shard_bytes: Largest size of a shard in bytes.
    """

    copy: bool = True
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The files of a set of tensors, each of which one rank writes.

    Attributes:
        stem: Name of the files without number and extension.
        shapes: All tensors by name; only shapes and sizes are used, so meta tensors suffice.
        files: For each file, the rank that writes it and its slices.
        are_whole: Whether each slice is a whole tensor, which has its own name in the file.
    """

    stem: str
    shapes: Mapping[str, Tensor]
    files: tuple[tuple[int, tuple[TensorSlice, ...]], ...]
    are_whole: bool

    @classmethod
    def from_tensors(
        cls, stem: str, tensors: Mapping[str, Tensor], max_bytes: int, ranks: int = 1
    ) -> TensorFiles:
        """Split tensors, ordered by name, into files, which the ranks write in turn.

        Args:
            stem: Name of the files without number and extension.
            tensors: Tensors by name; only shapes and sizes are used.
            max_bytes: Largest size of a file in bytes; a tensor that is larger gets its own file.
            ranks: The number of ranks.
        """
        slices = [
            TensorSlice(name, (0,) * tensor.ndim, tuple(tensor.shape))
            for name, tensor in sorted(tensors.items())
        ]
        files = _split_by_size(slices, tensors, max_bytes) or [()]
        return cls(stem, tensors, tuple((i % ranks, file) for i, file in enumerate(files)), are_whole=True)

    @classmethod
    def from_slices(
        cls,
        stem: str,
        tensors: Mapping[str, Tensor],
        slices_by_rank: Sequence[Sequence[TensorSlice]],
        max_bytes: int,
    ) -> TensorFiles:
        """Split the slices that each rank writes into files of at most `max_bytes`, or of one slice."""
        files = [
            (rank, file)
            for rank, slices in enumerate(slices_by_rank)
            for file in _split_by_size(slices, tensors, max_bytes)
        ]
        return cls(stem, tensors, tuple(files), are_whole=False)

    def get_key(self, part: TensorSlice) -> str:
        """Return the name of a slice in its file."""
        return part.name if self.are_whole else part.key

    def get_file_name(self, index: int) -> str:
        """Return the name of a file, given by its index from 0."""
        if len(self.files) == 1 and self.are_whole:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{index + 1:05d}-of-{len(self.files):05d}.safetensors"

    def list_own_names(self, rank: int) -> set[str]:
        """Return the names of the tensors of which a rank writes a slice."""
        return {part.name for writer, file in self.files if writer == rank for part in file}

    def list_rank_files(self, rank: int) -> dict[str, tuple[TensorSlice, ...]]:
        """Return the files that a rank writes, with their slices."""
        return {self.get_file_name(i): file for i, (writer, file) in enumerate(self.files) if writer == rank}

    def write_index(self, folder: Path) -> list[Path]:
        """Write the index of the files, which one file of whole tensors does not need.

        Args:
            folder: The folder of the files.

        Returns:
            The path of the index, or an empty list.
        """
        if len(self.files) == 1 and self.are_whole:
            return []
        index: dict[str, Any] = {"metadata": {"total_size": sum(t.nbytes for t in self.shapes.values())}}
        if self.are_whole:
            index["weight_map"] = {
                part.name: self.get_file_name(i) for i, (_, file) in enumerate(self.files) for part in file
            }
        else:
            index["files"] = [self.get_file_name(i) for i in range(len(self.files))]
            index["tensors"] = {
                name: {"shape": list(t.shape), "slices": []} for name, t in sorted(self.shapes.items())
            }
            for i, (_, file) in enumerate(self.files):
                for part in file:
                    index["tensors"][part.name]["slices"].append([i, part.start, part.shape])
        path = folder / f"{self.stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1 if self.are_whole else None), encoding="utf-8")
        return [path]


def _split_by_size(
    slices: Sequence[TensorSlice], tensors: Mapping[str, Tensor], max_bytes: int
) -> list[tuple[TensorSlice, ...]]:
    """Split slices, in their order, into groups of at most `max_bytes`, or of one slice."""

    def count_bytes(part: TensorSlice) -> int:
        return math.prod(part.shape) * tensors[part.name].element_size()

    return list(map(tuple, batch_by_size(slices, count_bytes, max_bytes)))


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """A set of tensors, of which this rank has those that it writes.

    Attributes:
        files: The files of the set.
        own: At least what this rank writes, by its name in the files.
    """

    files: TensorFiles
    own: Mapping[str, Tensor]

    def make_writer(self, rank: int, *, copy: bool) -> Callable[[Path], list[Path]]:
        """Return a function that writes a rank's files into a folder and returns their paths; rank 0 also writes the index.

        Args:
            rank: This rank.
            copy: Whether the tensors are copied to the host first.
        """
        keys_by_file = {
            name: list(map(self.files.get_key, file))
            for name, file in self.files.list_rank_files(rank).items()
        }
        contents = {name: {key: self.own[key] for key in keys} for name, keys in keys_by_file.items()}
        if copy:
            contents = {name: copy_to_host(named) for name, named in contents.items()}

        def write(folder: Path) -> list[Path]:
            for name, named in contents.items():
                write_tensors(folder / name, named)
            return [folder / name for name in contents] + ([] if rank else self.files.write_index(folder))

        return write


def write_tensors(
    path: Path, named: Mapping[str, Tensor], shapes: Mapping[str, Tensor] | None = None
) -> None:
    """Write tensors into one safetensors file, byte for byte as the safetensors library does.

    Args:
        path: The path of the file.
        named: The tensors by name; each is read once.
        shapes: Meta tensors of the same shapes and dtypes; by default they are made from the tensors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name, tensor = "", torch.empty(0)
    shapes = to_meta_tensors(named) if shapes is None else shapes
    ordered = dict(sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("wb") as file:
        file.write(build_header(ordered))
        for bucket in plan_buckets(ordered, BUCKET_BYTES):
            for piece in bucket:
                if piece.name != name:
                    name, tensor = piece.name, named[piece.name]
                host = piece.select_from({name: tensor}).detach().cpu().contiguous()
                # Written without NumPy, since an offload cannot release memory that a NumPy array refers to.
                file.write((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))


def merge_shards(path: Path, merged_path: Path) -> Path:
    """Return the file itself if it exists, else merge its shards into one file.

    Args:
        path: The path of the unsharded file, from which the names of the shards are derived.
        merged_path: The path of the merged file.
    """
    if path.exists():
        return path
    stored = StoredTensors(path)
    write_tensors(merged_path, stored, stored.describe())
    return merged_path


BASE = "base.json"
"""A file next to a checkpoint's weights with the SHA-256 of the folder of the base model that they belong to."""


def load_model(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint's dense folder into a model.

    Raises:
        CheckpointError: The weights do not fit the model.
    """
    load_weights(model, folder / "model.safetensors")


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load the weights of a safetensors file, or of its shards, into a model.

    Raises:
        CheckpointError: The weights do not fit the model, or belong to a base model other than the one that was loaded.
    """
    check_base(model, read_base(path.parent), str(path.parent))
    stored, state = StoredTensors(path), model.state_dict()
    division = getattr(model, "division", None)  # What divides the model among ranks.
    load = partial(_load_tensor, state) if division is None else division.load_part
    try:
        tensors = {name: load(stored, name) for name in stored}
        model.load_state_dict(_match_optional_weights(state, tensors))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path.parent}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None


@torch.no_grad()
def _load_tensor(state: Mapping[str, Tensor], stored: StoredTensors, name: str) -> Tensor:
    """Copy a stored tensor into a state dict, and return it as the state dict has it; as it is stored if it does not fit."""
    if name not in state or stored.get_shape(name) != tuple(state[name].shape):
        return stored[name]
    return state[name].copy_(stored[name])


def write_base(sha256: str, folder: Path) -> list[Path]:
    """Write the SHA-256 of the base model into a checkpoint's folder. Returns the path of the file in a list."""
    path = folder / "dense" / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sha256": sha256}), encoding="utf-8")
    return [path]


def read_base(dense: Path) -> str | None:
    """Return the SHA-256 of the base model that a checkpoint's weights belong to, None if it names no base model."""
    file = dense / BASE
    return json.loads(file.read_text(encoding="utf-8"))["sha256"] if file.exists() else None


def check_base(model: torch.nn.Module, base_sha256: str | None, location: str) -> None:
    """Raise CheckpointError if weights belong to another base model; without a recorded SHA-256, nothing is checked."""
    check_base_sha256(getattr(model, "base_sha256", None), base_sha256, location)


def check_base_sha256(model_sha256: str | None, checkpoint_sha256: str | None, location: str) -> None:
    """Raise CheckpointError if the base model that was loaded is not the one that the weights belong to.

    Args:
        model_sha256: SHA-256 of the base folder that `model.path` names; None for a model without one.
        checkpoint_sha256: SHA-256 that the checkpoint names; None if it was written by a version that did not record it.
        location: The text that the error message begins with.
    """
    if model_sha256 is not None and checkpoint_sha256 is not None and checkpoint_sha256 != model_sha256:
        raise CheckpointError(
            f"{location}: its weights go with a base model of SHA-256 {checkpoint_sha256[:12]}, "
            f"and model.path holds {model_sha256[:12]}; put the base "
            "folder back, or start a run with the new one"
        )


def _match_optional_weights(
    model_tensors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with exactly those weights of a memory that the model has.

    A memory and its nearest-item voter can be added to a checkpoint or removed from it, so their weights are loaded only
    if the model has them in the same shape; otherwise the model keeps its own.
    """
    signal_names = (name for name in {**tensors, **model_tensors} if name.startswith(SIGNAL_WEIGHT))
    optional_names = (MEMORY_WEIGHTS, f"{QUERY}.weight", *signal_names)
    matched = {name: tensor for name, tensor in tensors.items() if name not in optional_names}
    for name in optional_names:
        if name in model_tensors:
            loaded = tensors.get(name)
            has_same_shape = loaded is not None and loaded.shape == model_tensors[name].shape
            matched[name] = tensors[name] if has_same_shape else model_tensors[name]
    return matched
