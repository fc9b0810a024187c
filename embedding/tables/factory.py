"""The creation of sparse tables: native tables of the C++ core, or NumPy tables, with a warning, if the core is unavailable.

The choice is made once per process. `get_core_status` returns it with its reason, for plans and metrics.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from functools import cache

from nonet.embedding.tables.base import BaseTable
from nonet.embedding.tables.native_library import NativeUnavailable, load_library
from nonet.embedding.tables.optimizers import get_row_optimizer
from nonet.embedding.tables.spec import TableSpec


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """Which implementation of sparse tables this process uses.

    Attributes:
        native: Whether the C++ core is used.
        isa: The instruction set for which the C++ core was compiled; empty if it is not used.
        reason: Why the core is not used; empty if it is.
    """

    native: bool
    isa: str
    reason: str

    def __str__(self) -> str:
        if self.native:
            return f"C++ core ({platform.machine()}, {self.isa})"
        return f"NumPy tables: {self.reason}"


class SlowTablesWarning(UserWarning):
    """The warning that a process uses the slow NumPy tables because the C++ core is unavailable."""


@cache
def get_core_status() -> CoreStatus:
    """Return which implementation the sparse tables of this process use."""
    try:
        return CoreStatus(native=True, isa=load_library().nonet_isa(None).decode(), reason="")
    except NativeUnavailable as reason:
        return CoreStatus(native=False, isa="", reason=str(reason))


def make_table(name: str, spec: TableSpec, seed: int) -> BaseTable:
    """Create the table that `spec` describes, as a native table if possible.

    It is a NumPy table if the C++ core is unavailable, with a warning once per process, or if the core does not implement the
    optimizer.
    """
    if get_row_optimizer(spec.optimizer).number is None:
        from nonet.embedding.tables.numpy_table import NumPyTable

        return NumPyTable.from_spec(name, spec, seed)
    if get_core_status().native:
        from nonet.embedding.tables.native_table import NativeTable

        return NativeTable.from_spec(name, spec, seed)
    from nonet.embedding.tables.numpy_table import NumPyTable

    _warn_once()
    return NumPyTable.from_spec(name, spec, seed)


@cache
def _warn_once() -> None:
    warnings.warn(
        f"Sparse tables run on NumPy, about ten times slower than on the C++ core: {get_core_status().reason}",
        SlowTablesWarning,
        stacklevel=3,
    )
