from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.embedding.tables.native_table import NativeTable
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.tiers.tiered_table import TieredTable
from nonet.embedding.tiers.tiers import TierSettings
from nonet.embedding.training.counters import COUNTED, TableCounters, sum_shard_counts


def step_on(table, keys, step):
    table.lookup(np.array(keys), train=True)
    table.apply(np.array(keys), torch.ones(len(keys), 4), step)


@pytest.mark.parametrize("kind", [NativeTable, NumPyTable])
def test_counts_are_what_came_since_the_last_time_and_add_up(kind):
    table = kind.from_spec("item", TableSpec(4, admit_count=2, ttl_steps=4), 7)
    counters = TableCounters({"item": table})
    step_on(table, [1, 2, 2, 3], 1)
    first = counters.take()["item"]
    assert first == {"rows": 0, "admitted": 0, "refused": 4, "evicted": 0, "dropped": 4, "absent": 0}
    step_on(table, [1, 2], 2)
    for step in range(3, 9):
        step_on(table, [1], step)
    table.lookup(np.array([1, 2, 9]), train=False)
    second = counters.take()["item"]
    assert second == {"rows": 1, "admitted": 2, "refused": 0, "evicted": 1, "dropped": 0, "absent": 2}
    assert not any(counters.take()["item"][what] for what in COUNTED)
    assert sum_shard_counts([{"item": first}, {"item": second}])["item"]["refused"] == 4


def test_a_table_in_tiers_also_tells_where_its_rows_are(tmp_path):
    host = NativeTable.from_spec("item", TableSpec(4), 7)
    table = TieredTable.from_host(host, TierSettings(device_rows=4, host_rows=10, folder=str(tmp_path)))
    counters = TableCounters({"item": table})
    for step in range(1, 6):
        step_on(table, range(8 * step, 8 * step + 8), step)
    counts = counters.take()["item"]
    assert (counts["rows"], counts["admitted"], counts["device_rows"]) == (40, 40, 4)
    assert counts["host_rows"] + counts["cold_rows"] == 40
    assert counts["host_rows"] <= 10


def test_host_bytes_are_turned_into_rows():
    spec = TableSpec(4)
    tiers = TierSettings.from_settings(spec, {"host_bytes": 100 * spec.row_bytes, "policy": "lfu"})
    assert tiers.host_rows == 100
    assert tiers.folder.endswith("nonet-cold")
