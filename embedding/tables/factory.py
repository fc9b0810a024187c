"""Choose a run's table implementation: the C++ core, or the NumPy tables with a warning if the core is unavailable.

`make_table` decides once per process. `get_core_status` returns the decision and its reason for plans and metrics.
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
        isa: The instruction set of the C++ core.
        reason: Why the NumPy tables are used instead.
    """

    native: bool
    isa: str
    reason: str

    def __str__(self) -> str:
        if self.native:
            return f"C++ core ({platform.machine()}, {self.isa})"
        return f"NumPy twin: {self.reason}"


class SlowTablesWarning(UserWarning):
    """A warning that sparse tables run on NumPy."""


@cache
def get_core_status() -> CoreStatus:
    """Return which implementation the sparse tables of this process use."""
    try:
        return CoreStatus(True, load_library().nonet_isa(None).decode(), "")
    except NativeUnavailable as reason:
        return CoreStatus(False, "", str(reason))


def make_table(name: str, spec: TableSpec, seed: int) -> BaseTable:
    """Create the table that `spec` describes on the C++ core, or, with one warning, on NumPy if there is no core.

    A table whose optimizer has no native rule is on NumPy too.
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
        f"sparse tables run on the NumPy twin, about ten times slower than the C++ core: {get_core_status().reason}",
        SlowTablesWarning,
        stacklevel=3,
    )
