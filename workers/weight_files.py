"""Reading and writing of named tensors as safetensors files, split into shards with an index as Hugging Face does.

    model.safetensors                                                    if all tensors fit into one shard
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json  otherwise

If several ranks hold the tensors, each writes every n-th shard. A file is written piece by piece from the memory of its
tensors. Writing needs no additional host memory for tensors on the host, and that of one bucket for tensors on a device.
Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nonet.errors import CheckpointError
from nonet.models.generation import MEMORY_WEIGHTS, QUERY
from nonet.workers.weights import BUCKET_BYTES, build_header, plan_buckets, to_meta_tensors

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
class TensorShards:
    """The assignment of tensors to the files of a sharded safetensors checkpoint.

    Attributes:
        stem: Name of the files without number and extension.
        names: For each file, the names of its tensors.
    """

    stem: str
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def from_tensors(cls, stem: str, tensors: Mapping[str, Tensor], max_bytes: int) -> TensorShards:
        """Split tensors, ordered by name, into shards; a tensor that is larger than a shard gets its own file.

        Args:
            stem: Name of the files without number and extension.
            tensors: Tensors by name; only names and sizes are used.
            max_bytes: Largest size of a shard in bytes.
        """
        shards: list[list[str]] = [[]]
        shard_bytes = 0
        for name in sorted(tensors):
            if shards[-1] and shard_bytes + tensors[name].nbytes > max_bytes:
                shards.append([])
                shard_bytes = 0
            shards[-1].append(name)
            shard_bytes += tensors[name].nbytes
        return cls(stem, tuple(map(tuple, shards)))

    def get_file_name(self, index: int) -> str:
        """Return the file name of a shard, given by its index from 0."""
        if len(self.names) == 1:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{index + 1:05d}-of-{len(self.names):05d}.safetensors"

    def select_rank_files(self, rank: int, ranks: int) -> dict[str, tuple[str, ...]]:
        """Return the files that a rank writes, with the names of their tensors."""
        return {self.get_file_name(i): names for i, names in enumerate(self.names) if i % ranks == rank}

    def write_index(self, folder: Path, total_bytes: int) -> list[Path]:
        """Write the index file if there is more than one shard.

        Args:
            folder: The folder of the shards.
            total_bytes: Total size of all tensors in bytes.

        Returns:
            The path of the index, or an empty list.
        """
        if len(self.names) == 1:
            return []
        file_by_name = {name: self.get_file_name(i) for i, names in enumerate(self.names) for name in names}
        path = folder / f"{self.stem}.safetensors.index.json"
        path.write_text(
            json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": file_by_name}, indent=1)
        )
        return [path]


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    """Write tensors by name into one safetensors file, byte for byte as the safetensors library does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = to_meta_tensors(named)
    ordered = dict(sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("wb") as file:
        file.write(build_header(ordered))
        for bucket in plan_buckets(ordered, BUCKET_BYTES):
            for piece in bucket:
                host = piece.select_from(named).detach().cpu().contiguous()
                # Written without NumPy, since an offload cannot release memory that a NumPy array refers to.
                file.write((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of the shards that its index names; each is memory-mapped when it is read.

    Raises:
        CheckpointError: A shard or a tensor is missing.
    """

    def __init__(self, path: Path):
        index = path.with_name(f"{path.name}.index.json")
        is_sharded = index.exists() and not path.exists()
        file_by_name = json.loads(index.read_text())["weight_map"] if is_sharded else {}
        self._file_by_name: dict[str, Path] = {}
        self._opened_file: Path | None = None
        self._opened: Any = None
        for file in sorted({path.parent / name for name in file_by_name.values()}) or [path]:
            if is_sharded and not file.exists():
                raise CheckpointError(f"{index} names {file.name}, which is not there")
            with safe_open(file, framework="pt") as opened:
                self._file_by_name |= dict.fromkeys(opened.offset_keys(), file)
        if missing := sorted(file_by_name.keys() - self._file_by_name.keys()):
            raise CheckpointError(f"{path.parent}: the shards lack {missing[0]}, which {index.name} names")

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor, memory-mapped."""
        file = self._file_by_name[name]
        if file != self._opened_file:
            self._opened_file, self._opened = file, safe_open(file, framework="pt")
        return self._opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of the files."""
        return iter(self._file_by_name)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._file_by_name)


def merge_shards(path: Path, merged_path: Path) -> Path:
    """Return the file itself if it exists, else merge its shards into one file.

    Args:
        path: The path of the unsharded file, from which the names of the shards are derived.
        merged_path: The path of the merged file.
    """
    if path.exists():
        return path
    write_tensors(merged_path, StoredTensors(path))
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
    try:
        division = getattr(model, "division", None)  # What divides the model among ranks.
        tensors = {
            name: whole if division is None else division.take_part(name, whole)
            for name, whole in StoredTensors(path).items()
        }
        model.load_state_dict(_match_optional_weights(model.state_dict(), tensors))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path.parent}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None


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
    optional_names = (MEMORY_WEIGHTS, f"{QUERY}.weight")
    matched = {name: tensor for name, tensor in tensors.items() if name not in optional_names}
    for name in optional_names:
        if name in model_tensors:
            loaded = tensors.get(name)
            has_same_shape = loaded is not None and loaded.shape == model_tensors[name].shape
            matched[name] = tensors[name] if has_same_shape else model_tensors[name]
    return matched
