"""Which table a run uses: the C++ core, or its NumPy twin where the core cannot be had; never silently.

`make_table` is the one place that decides, once a process. `get_core_status` says what it decided and why, for plans and
metrics; the twin is announced by one warning.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from functools import cache

from nonet.embedding.tables.base import BaseTable
from nonet.embedding.tables.native_library import NativeUnavailable, load_library
from nonet.embedding.tables.spec import TableSpec


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """`native`: the C++ core runs, with the instructions of `isa`; else `reason` says why the NumPy twin does."""

    native: bool
    isa: str
    reason: str

    def __str__(self) -> str:
        if self.native:
            return f"C++ core ({platform.machine()}, {self.isa})"
        return f"NumPy twin: {self.reason}"


class SlowTablesWarning(UserWarning):
    """Sparse tables run on the NumPy twin."""


@cache
def get_core_status() -> CoreStatus:
    """What sparse tables of this process run on."""
    try:
        return CoreStatus(True, load_library().nonet_isa(None).decode(), "")
    except NativeUnavailable as reason:
        return CoreStatus(False, "", str(reason))


def make_table(name: str, spec: TableSpec, seed: int) -> BaseTable:
    """The table that `spec` describes, on the core; on the NumPy twin, with one warning, where there is no core."""
    if get_core_status().native:
        from nonet.embedding.tables.native_table import NativeTable

        return NativeTable.from_spec(name, spec, seed)
    from nonet.embedding.tables.numpy_table import NumPyTable

    _warn_once()
    return NumPyTable.from_spec(name, spec, seed)


@cache
def _warn_once() -> None:
    warnings.warn(
        f"sparse tables run on the NumPy twin, about ten times slower than the C++ core: {get_core_status().reason}",
        SlowTablesWarning,
        stacklevel=3,
    )
