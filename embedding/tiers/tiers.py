"""How many rows of a table lie on a device, in memory and on disk.

Rows on the device keep their place in memory, so memory holds more than twice as many; what is over its budget goes to disk.

What went between the tiers of a table, for metrics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nonet.embedding.tables import TableSpec
from nonet.embedding.tiers.device_cache import count_device_row_bytes
from nonet.errors import ConfigError

if TYPE_CHECKING:
    from nonet.embedding.tiers.tiered_table import TieredTable


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What each tier may hold.

    device, device_rows or device_bytes   where hot rows lie and how many; neither: no such tier
    policy       who leaves the device: lfu or lru, after what the coming batches need
    host_rows    rows that memory holds before some go to disk, with `folder` to put them; 0: all
    """

    device: str = "cpu"
    device_rows: int = 0
    device_bytes: int = 0
    policy: str = "lfu"
    host_rows: int = 0
    folder: str = ""

    @classmethod
    def from_settings(cls, spec: TableSpec, settings_by_name: Mapping[str, Any], device: str = "cpu") -> Self:
        """From a configuration: `host_bytes` in place of host_rows, and the system's scratch space where no folder is named."""
        settings = dict(settings_by_name)
        host_bytes = settings.pop("host_bytes", 0)
        if host_bytes:
            settings["host_rows"] = _convert_to_rows(host_bytes, spec.row_bytes, "host")
        if settings.get("host_rows"):
            settings.setdefault("folder", str(Path(tempfile.gettempdir()) / "nonet-cold"))
        return cls(device=device, **settings)

    def count_device_rows(self, spec: TableSpec) -> int:
        """The device's budget in rows; of two the smaller."""
        budgets = [self.device_rows, self.device_bytes // count_device_row_bytes(spec)]
        return min((budget for budget in budgets if budget), default=0)

    def check(self, spec: TableSpec) -> None:
        """ConfigError where these tiers cannot serve such a table."""
        if self.device_bytes:
            _convert_to_rows(self.device_bytes, count_device_row_bytes(spec), "device")
        if bool(self.host_rows) != bool(self.folder):
            raise ConfigError(
                f"a cold tier wants host_rows and a folder, got {self.host_rows} and {self.folder!r}; give both or neither"
            )
        if self.host_rows and self.host_rows <= 2 * self.count_device_rows(spec):
            raise ConfigError(
                f"host_rows must be more than twice the {self.count_device_rows(spec)} rows of the device, got {self.host_rows}: "
                "every row on the device keeps its place in memory"
            )
        if self.host_rows and spec.evicts:
            raise ConfigError(
                "a table that forgets rows (ttl_steps, or evict and a budget) has no use for a cold tier: "
                "leave out host_rows and folder, or the eviction"
            )


def _convert_to_rows(budget: int, row: int, tier: str) -> int:
    if budget < row:
        raise ConfigError(
            f"{budget} bytes of {tier} hold no row: one takes {row} with its optimizer state. Raise it, or leave it out"
        )
    return budget // row


@dataclass
class TierTraffic:
    """Distinct rows that training batches asked for, that came up from the host, and that went back changed."""

    wanted: int = 0
    loaded: int = 0
    bypassed: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the rows asked for that was here and did not have to come."""
        return 1 - (self.loaded + self.bypassed) / self.wanted if self.wanted else 0.0


def report(table: TieredTable) -> dict[str, Any]:
    """What the tiers hold and what went between them, for metrics."""
    counts: dict[str, Any] = {
        "host_rows": len(table.host),
        "promoted": table.promoted,
        "demoted": table.demoted,
    }
    if table.hot is not None:
        traffic = table.traffic
        counts |= {
            "device_rows": len(table.hot),
            "hit_rate": traffic.hit_rate,
            "loaded": traffic.loaded,
            "written": traffic.written,
        }
    if table.cold is not None:
        counts |= {"cold_rows": len(table.cold), "cold_bytes": table.cold.nbytes}
    return counts
