"""What a shard's tables did since they were last asked: rows made, refused and gone, and default rows read.

Counts are differences, so that a run which resumes adds up to the same sums as one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.embedding.tiers import TieredTable, report

COUNTED = ("admitted", "refused", "evicted", "dropped", "absent")


class TableCounters:
    """Counts of the tables of one shard, from the moment it is made.

    rows       held now
    admitted   ids that got a row; evicted: that lost it
    refused    positions of training look-ups, absent: of reading ones, that read the default row
    dropped    positions of gradients whose id had no row
    and of tables in tiers what `traffic.report` says
    """

    def __init__(self, tables: Mapping[str, Any]):
        self._tables = dict(tables)
        self._before = self._read_totals()

    def take(self) -> dict[str, dict[str, int]]:
        """{table: {"rows": held, and of COUNTED what came since the last time}}."""
        now = self._read_totals()
        before, self._before = self._before, now
        return {
            name: {"rows": len(self._tables[name]), **_report_tiers(self._tables[name])}
            | {what: count - before[name][what] for what, count in counts.items()}
            for name, counts in now.items()
        }

    def _read_totals(self) -> dict[str, dict[str, int]]:
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
    """Of a table in tiers: rows in each now, and how many went between them since it was made."""
    if not isinstance(table, TieredTable):
        return {}
    return {name: value for name, value in report(table).items() if isinstance(value, int)}


def merge_counts(
    before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Counts taken one after the other as those of the whole time: COUNTED add up, the others are as they are now."""
    return {
        table: counts | {what: counts[what] + before.get(table, {}).get(what, 0) for what in COUNTED}
        for table, counts in now.items()
    }


def sum_shard_counts(shards: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The counts of all shards as those of one."""
    totals: dict[str, dict[str, int]] = {}
    for shard in shards:
        for table, counts in shard.items():
            sums = totals.setdefault(table, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                sums[name] += count
    return totals
