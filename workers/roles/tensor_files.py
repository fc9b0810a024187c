"""Tensors and tables in files: safetensors and Arrow IPC, never a pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name into one safetensors file."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are, in host memory of their own."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote."""
    from safetensors.torch import load_file

    return load_file(path)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors bytes: the wire form of weights."""
    from safetensors.torch import save

    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """Tensors of safetensors bytes."""
    from safetensors.torch import load

    return load(data)


def write_tables(path: Path, tables: Iterable[pa.Table]) -> None:
    """Arrow tables of one schema into one IPC file; no file when there are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = None
    for table in tables:
        writer = writer or pa.ipc.new_file(str(path), table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def read_tables(path: Path) -> pa.Table:
    """What `write_tables` wrote, as one table."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def sha256(path: Path) -> str:
    """Hash of a file's bytes, hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
