"""What went between the tiers of a table, for metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nonet.embedding.tiered_table import TieredTable


@dataclass
class Traffic:
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
    found: dict[str, Any] = {
        "host_rows": len(table.host),
        "promoted": table.promoted,
        "demoted": table.demoted,
    }
    if table.hot is not None:
        traffic = table.traffic
        found |= {
            "device_rows": len(table.hot),
            "hit_rate": traffic.hit_rate,
            "loaded": traffic.loaded,
            "written": traffic.written,
        }
    if table.cold is not None:
        found |= {"cold_rows": len(table.cold), "cold_bytes": table.cold.nbytes}
    return found
