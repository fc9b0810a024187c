"""Tensors by name as files: safetensors, cut into shards of bounded bytes with an index, as Hugging Face names them.

    model.safetensors                                   what fits one shard
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json

Ranks that all have the tensors write a shard each in turn. A file is written piece by piece from where its tensors lie, so
writing takes no memory of its own on the host, and of a device a bucket. Nothing is a pickle.
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
    """How a state is saved: `copy` of what later steps change, or as it lies while nothing steps; bytes of a shard at most."""

    copy: bool = True
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class TensorShards:
    """The names of tensors in each file of a set."""

    stem: str
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def from_tensors(cls, stem: str, tensors: Mapping[str, Tensor], max_bytes: int) -> TensorShards:
        """Tensors in the order of their names, a shard after the other; one that is larger than a shard has its own."""
        files: list[list[str]] = [[]]
        size = 0
        for name in sorted(tensors):
            if files[-1] and size + tensors[name].nbytes > max_bytes:
                files.append([])
                size = 0
            files[-1].append(name)
            size += tensors[name].nbytes
        return cls(stem, tuple(map(tuple, files)))

    def get_file_name(self, number: int) -> str:
        """The name of a shard's file."""
        if len(self.names) == 1:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{number + 1:05d}-of-{len(self.names):05d}.safetensors"

    def select_rank_files(self, rank: int, ranks: int) -> dict[str, tuple[str, ...]]:
        """The files that a rank writes: names of tensors by file."""
        return {self.get_file_name(at): names for at, names in enumerate(self.names) if at % ranks == rank}

    def write_index(self, folder: Path, total_bytes: int) -> list[Path]:
        """The index of more than one shard; none of one."""
        if len(self.names) == 1:
            return []
        where = {name: self.get_file_name(at) for at, names in enumerate(self.names) for name in names}
        path = folder / f"{self.stem}.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": where}, indent=1))
        return [path]


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    """Tensors by name into one safetensors file, byte for byte as that library writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with path.open("wb") as file:
        file.write(build_header(ordered))
        for bucket in plan_buckets(ordered, BUCKET_BYTES):
            for piece in bucket:
                host = piece.select_from(ordered).detach().cpu().contiguous()
                # Where it lies: not by way of NumPy, for memory that it has seen cannot be given back by an offload.
                file.write((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of the shards that its index names, mapped. Raises CheckpointError where a shard is missing."""
    from safetensors.torch import load_file

    index = path.with_name(f"{path.name}.index.json")
    if path.exists() or not index.exists():
        return load_file(path)
    where = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        if not (path.parent / file).exists():
            raise CheckpointError(f"{index} names {file}, which is not there")
        tensors |= load_file(path.parent / file)
    if missing := sorted(where.keys() - tensors.keys()):
        raise CheckpointError(f"{path.parent}: the shards lack {missing[0]}, which {index.name} names")
    return tensors


def merge_shards(path: Path, merged_path: Path) -> Path:
    """The file itself where it is one, else its shards as one file at `beside`."""
    if path.exists():
        return path
    write_tensors(merged_path, read_tensors(path))
    return merged_path


BASE = "base.json"  # beside a checkpoint's weights: the SHA-256 of the folder that its base model is in


def load_model(model: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a commit's dense folder into a model. Raises CheckpointError when they do not fit."""
    load_weights(model, folder / "model.safetensors")


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Put the weights of a safetensors file, or its shards, into a model.

    Raises:
        CheckpointError: They do not fit, or belong to another base model than the one that was loaded.
    """
    check_base(model, read_base(path.parent), str(path.parent))
    try:
        model.load_state_dict(_select_known(model, read_tensors(path)))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path.parent}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None


def write_base(sha256: str, folder: Path) -> list[Path]:
    """Write into a checkpoint which base model its weights go with. Returns the file."""
    path = folder / "dense" / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sha256": sha256}), encoding="utf-8")
    return [path]


def read_base(dense: Path) -> str | None:
    """Return the SHA-256 of the base model that the weights of a checkpoint's dense folder go with, where it names one."""
    file = dense / BASE
    return json.loads(file.read_text(encoding="utf-8"))["sha256"] if file.exists() else None


def check_base(model: torch.nn.Module, base_sha256: str | None, location: str) -> None:
    """Raise CheckpointError where weights go with another base model. Earlier versions named none."""
    check_base_sha256(getattr(model, "base_sha256", None), base_sha256, location)


def check_base_sha256(model_sha256: str | None, checkpoint_sha256: str | None, location: str) -> None:
    """Raise CheckpointError where the base model that is there is not the one that weights go with.

    Args:
        own: SHA-256 of the base folder that `model.path` names; None for a model without one.
        named: what the checkpoint says; None where it is of a version that named none.
        where: opens the error.
    """
    if model_sha256 is not None and checkpoint_sha256 is not None and checkpoint_sha256 != model_sha256:
        raise CheckpointError(
            f"{location}: its weights go with a base model of SHA-256 {checkpoint_sha256[:12]}, "
            f"and model.path holds {model_sha256[:12]}; put the base "
            "folder back, or start a run with the new one"
        )


def _select_known(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
