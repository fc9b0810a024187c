"""Re-ranking keeps the metric that chooses checkpoints, where lists can be measured by it."""

from __future__ import annotations

import pytest
from tests_ring import make_ring

from nonet.controller.scenario import load_scenario
from nonet.controller.stages._rerank import choose_list_metric


@pytest.mark.parametrize(
    ("best", "expected"),
    [("recall@5", "recall@5"), ("nats", "ndcg@10"), ("coverage@5", "ndcg@10"), (None, "recall@5")],
)
def test_lists_are_judged_by_a_metric_of_lists_whatever_chooses_checkpoints(tmp_path, best, expected):
    changes = ["evaluate.metrics=[recall@5, coverage@5]"]
    changes += [f"checkpoint.keep.best={best}"] if best else []
    scenario, _ = load_scenario(make_ring(tmp_path) / "ring.yaml", changes)
    assert choose_list_metric(scenario) == expected
