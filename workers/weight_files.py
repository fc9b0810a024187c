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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nonet.errors import CheckpointError
from nonet.models.generation import MEMORY_WEIGHTS, QUERY
from nonet.workers.weights import BUCKET_BYTES, build_header, plan_buckets

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
    ordered = dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("wb") as file:
        file.write(build_header(ordered))
        for bucket in plan_buckets(ordered, BUCKET_BYTES):
            for piece in bucket:
                host = piece.select_from(ordered).detach().cpu().contiguous()
                # Written without NumPy, since an offload cannot release memory that a NumPy array refers to.
                file.write((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of the shards that its index names, memory-mapped.

    Raises:
        CheckpointError: A shard or a tensor is missing.
    """
    from safetensors.torch import load_file

    index = path.with_name(f"{path.name}.index.json")
    if path.exists() or not index.exists():
        return load_file(path)
    file_by_name = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(file_by_name.values())):
        if not (path.parent / file).exists():
            raise CheckpointError(f"{index} names {file}, which is not there")
        tensors |= load_file(path.parent / file)
    if missing := sorted(file_by_name.keys() - tensors.keys()):
        raise CheckpointError(f"{path.parent}: the shards lack {missing[0]}, which {index.name} names")
    return tensors


def merge_shards(path: Path, merged_path: Path) -> Path:
    """Return the file itself if it exists, else merge its shards into one file.

    Args:
        path: The path of the unsharded file, from which the names of the shards are derived.
        merged_path: The path of the merged file.
    """
    if path.exists():
        return path
    write_tensors(merged_path, read_tensors(path))
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
        tensors = _match_optional_weights(model, read_tensors(path))
        model.load_state_dict(_divide_as(model.state_dict(), tensors))
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


def _divide_as(model_tensors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors divided among ranks as those of a model are; unchanged for a whole model."""
    if not torch.distributed.is_initialized():
        return dict(tensors)
    from torch.distributed.tensor import DTensor, Replicate

    divided = dict(tensors)
    for name, own in model_tensors.items():
        whole = tensors.get(name)
        if isinstance(own, DTensor) and whole is not None and not isinstance(whole, DTensor):
            everywhere = [Replicate()] * own.device_mesh.ndim
            replicated = DTensor.from_local(
                whole.to(own.device), own.device_mesh, everywhere, run_check=False
            )
            divided[name] = replicated.redistribute(placements=own.placements)
    return divided


def _match_optional_weights(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with exactly those weights of a memory that the model has.

    A memory and its nearest-item voter can be added to a checkpoint or removed from it, so their weights are loaded only
    if the model has them in the same shape; otherwise the model keeps its own.
    """
    model_tensors = model.state_dict()
    optional_names = (MEMORY_WEIGHTS, f"{QUERY}.weight")
    matched = {name: tensor for name, tensor in tensors.items() if name not in optional_names}
    for name in optional_names:
        if name in model_tensors:
            loaded = tensors.get(name)
            has_same_shape = loaded is not None and loaded.shape == model_tensors[name].shape
            matched[name] = tensors[name] if has_same_shape else model_tensors[name]
    return matched
