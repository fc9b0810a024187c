"""`nonet bench compression`: its log of repeats."""

import pyarrow.compute as pc

from nonet.bench.runs.compression import make_repeated_log
from nonet.samples.sequences import compress_log, expand_log


def test_a_log_with_three_repeats_in_ten_rows_has_a_quarter_fewer_events_and_expands_to_itself():
    log, items = make_repeated_log(seed=7)
    made = compress_log(log, 86_400, "item", items)
    assert len(log) / len(made.events) >= 1.3
    assert expand_log(made).equals(log)
    assert pc.sum(made.events["count"]).as_py() <= len(log)
