"""Counters of the tables of a shard: rows created, refused and evicted, and positions that read the default row.

A report has the counts since the last report, so that the reports of a resumed run add up to those of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.embedding.tiers import TieredTable, report

# The fields that count events, which add up over reports; all others describe the tables as they are now.
COUNTED = ("admitted", "refused", "evicted", "dropped", "absent")


class TableCounters:
    """The counters of the tables of one shard since this object was created.

    The fields per table are:
        rows: Rows in the table now.
        admitted: Rows created.
        refused: Positions of training lookups that read the default row because their key was not admitted.
        evicted: Rows removed by the eviction policy.
        dropped: Positions of gradients whose key had no row.
        absent: Positions of read-only lookups that read the default row because their key had no row.

    Tiered tables add the fields of `nonet.embedding.tiers.report`.
    """

    def __init__(self, tables: Mapping[str, Any]):
        self._tables = dict(tables)
        self._before = self._read_totals()

    def take(self) -> dict[str, dict[str, int]]:
        """Return the number of rows and the counts since the last call, by table."""
        now = self._read_totals()
        before, self._before = self._before, now
        return {
            name: {"rows": len(self._tables[name]), **_report_tiers(self._tables[name])}
            | {field: count - before[name][field] for field, count in counts.items()}
            for name, counts in now.items()
        }

    def _read_totals(self) -> dict[str, dict[str, int]]:
        """Return the counts since the creation of each table, by table."""
        return {
            name: {
                "admitted": len(table) + table.evicted,
                "refused": table.refused,
                "evicted": table.evicted,
                "dropped": table.dropped,
                "absent": table.absent,
            }
            for name, table in self._tables.items()
        }


def _report_tiers(table: Any) -> dict[str, int]:
    """Return the rows in each tier of a tiered table now, and the traffic between tiers since its creation."""
    if not isinstance(table, TieredTable):
        return {}
    return {name: value for name, value in report(table).items() if isinstance(value, int)}


def merge_counts(
    before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Merge consecutive counts: the fields in COUNTED are added, the others are taken from `now`."""
    return {
        table: counts | {field: counts[field] + before.get(table, {}).get(field, 0) for field in COUNTED}
        for table, counts in now.items()
    }


def sum_shard_counts(shards: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up all fields of the counts of all shards, by table."""
    totals: dict[str, dict[str, int]] = {}
    for shard in shards:
        for table, counts in shard.items():
            table_totals = totals.setdefault(table, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                table_totals[name] += count
    return totals
