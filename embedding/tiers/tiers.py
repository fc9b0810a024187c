"""The settings of how many rows of a table are on a device, in memory and on disk, and the traffic between these tiers.

Rows on the device keep their place in memory, so memory must have space for more than twice as many rows. Rows over
the budget of memory are moved to disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nonet.embedding.tables import TableSpec
from nonet.embedding.tables.optimizers import get_row_optimizer
from nonet.errors import ConfigError


def count_device_row_bytes(spec: TableSpec) -> int:
    """Compute the bytes of a row and its state on the device."""
    element_bytes = 4 if spec.dtype == "fp32" else 2
    return element_bytes * spec.dim + 4 * get_row_optimizer(spec.optimizer).state_width(spec.dim)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The capacity of each tier.

    Attributes:
        device: The device of the hot rows.
        device_rows: The maximum number of hot rows; if this and device_bytes are 0, there are none.
        device_bytes: The maximum number of bytes of hot rows; if both maxima are set, the smaller one applies.
        policy: Which rows are evicted from the device first, among those that no coming batch needs: lfu or lru.
        host_rows: The number of rows in memory above which rows are moved to disk; 0: all rows stay in memory.
        folder: The folder of the rows on disk; "" without rows on disk.
    """

    device: str = "cpu"
    device_rows: int = 0
    device_bytes: int = 0
    policy: str = "lfu"
    host_rows: int = 0
    folder: str = ""

    @classmethod
    def from_settings(cls, spec: TableSpec, settings_by_name: Mapping[str, Any], device: str = "cpu") -> Self:
        """Create tiers from a configuration.

        Args:
            spec: The table's spec.
            settings_by_name: The settings; `host_bytes` may replace host_rows, and the default folder is the
                system's scratch space.
            device: The device of the hot rows.
        """
        settings = dict(settings_by_name)
        host_bytes = settings.pop("host_bytes", 0)
        if host_bytes:
            settings["host_rows"] = _count_rows_in_budget(host_bytes, spec.row_bytes, "host")
        if settings.get("host_rows"):
            settings.setdefault("folder", str(Path(tempfile.gettempdir()) / "nonet-cold"))
        return cls(device=device, **settings)

    def count_device_rows(self, spec: TableSpec) -> int:
        """Compute the device's budget in rows, the smaller one if there are two; 0 if there is none."""
        budgets = [self.device_rows, self.device_bytes // count_device_row_bytes(spec)]
        return min((budget for budget in budgets if budget), default=0)

    def check(self, spec: TableSpec) -> None:
        """Check that these tiers fit a table.

        Raises:
            ConfigError: If they do not.
        """
        if self.device_bytes:
            _count_rows_in_budget(self.device_bytes, count_device_row_bytes(spec), "device")
        if bool(self.host_rows) != bool(self.folder):
            raise ConfigError(
                f"a cold tier needs host_rows and a folder, got {self.host_rows} and {self.folder!r}; set both or neither"
            )
        if self.host_rows and self.host_rows <= 2 * self.count_device_rows(spec):
            raise ConfigError(
                f"host_rows must be more than twice the {self.count_device_rows(spec)} rows of the device, got {self.host_rows}: "
                "every row on the device keeps its place in memory"
            )
        if self.host_rows and spec.evicts:
            raise ConfigError(
                "a table that evicts rows (ttl_steps, or evict and a budget) cannot have a cold tier: "
                "leave out host_rows and folder, or the eviction"
            )


def _count_rows_in_budget(budget_bytes: int, row_bytes: int, tier: str) -> int:
    """Return the number of rows that fit into a tier's budget; raise ConfigError if there are none."""
    if budget_bytes < row_bytes:
        raise ConfigError(
            f"{budget_bytes} bytes of {tier} hold no row: one takes {row_bytes} with its optimizer state. "
            "Raise it, or leave it out"
        )
    return budget_bytes // row_bytes


@dataclass
class TierTraffic:
    """Counts of distinct rows in training batches.

    Attributes:
        wanted: Rows that batches requested.
        loaded: Rows loaded from the host to the device.
        bypassed: Requested rows that did not fit on the device.
        written: Changed rows written back to the host.
    """

    wanted: int = 0
    loaded: int = 0
    bypassed: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        """The fraction of requested rows that were already on the device."""
        return 1 - (self.loaded + self.bypassed) / self.wanted if self.wanted else 0.0
