"""Probes of a node and of its devices: quick checks with known results, which find hardware that works no more."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from nonet.workers.devices.vendors import HOST, get_device

_DISK_BYTES = 1 << 20
_SIZE = 256  # of the square matrices whose product is computed


def probe_host(folder: Path) -> str:
    """Write, sync and read a file, and compute a product of matrices.

    Args:
        folder: A folder on the disk that the node's workers write to, which is created.

    Returns:
        What is wrong, in one clause; "" if nothing is.
    """
    content = secrets.token_bytes(_DISK_BYTES)
    path = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != content:
                return f"{folder} does not return what was written"
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    values = np.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE) % 7
    product = values.astype(np.float64) @ values.astype(np.float64)
    return "" if np.array_equal(product, values @ values) else "its CPU computed a wrong product"


def probe_devices(kind: str) -> dict[str, str]:
    """Probe all devices of a kind that Ray gave to this process.

    Returns:
        By the id of a device: what is wrong with it, in one clause; "" if nothing is.
    """
    device = get_device(kind)
    if device.name == HOST:
        return {}
    ids = device.read_visible_ids() or ("0",)
    problems = {}
    for index, device_id in enumerate(ids):
        try:
            problems[device_id] = device.probe(index)
        except Exception as error:  # whatever a broken driver raises
            problems[device_id] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return problems
