"""Counters of a shard's tables: rows created, refused and removed, and default rows read since the last report.

Counts are differences, so that the counts of a resumed run add up to the sums of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.embedding.tiers import TieredTable, report

COUNTED = ("admitted", "refused", "evicted", "dropped", "absent")


class TableCounters:
    """Counts what the tables of one shard do after this object was created.

    The fields are: rows in the table now; admitted and evicted ids; refused positions of training look-ups and
    absent positions of read-only look-ups, which read the default row; dropped positions of gradients whose id had
    no row. Tables in tiers add the fields of `report`.
    """

    def __init__(self, tables: Mapping[str, Any]):
        self._tables = dict(tables)
        self._before = self._read_totals()

    def take(self) -> dict[str, dict[str, int]]:
        """Return per table the number of rows and the counts since the last call."""
        now = self._read_totals()
        before, self._before = self._before, now
        return {
            name: {"rows": len(self._tables[name]), **_report_tiers(self._tables[name])}
            | {what: count - before[name][what] for what, count in counts.items()}
            for name, counts in now.items()
        }

    def _read_totals(self) -> dict[str, dict[str, int]]:
        """Return the counters of all tables since their creation."""
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
        table: counts | {what: counts[what] + before.get(table, {}).get(what, 0) for what in COUNTED}
        for table, counts in now.items()
    }


def sum_shard_counts(shards: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up the counts of all shards."""
    totals: dict[str, dict[str, int]] = {}
    for shard in shards:
        for table, counts in shard.items():
            sums = totals.setdefault(table, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                sums[name] += count
    return totals
