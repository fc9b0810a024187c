from __future__ import annotations

import pytest

from nonet.controller.scenario import load_scenario
from nonet.controller.setups import run_setup
from nonet.controller.tables import ttl_steps
from nonet.errors import ConfigError

DAY = 86400.0


def quickstart(*changes):
    return load_scenario("quickstart", list(changes))[0]


def test_a_table_s_policy_reaches_its_spec():
    item = (
        "{dim: 16, admit: {count: 3, probability: 0.5}, evict: {ttl_steps: 40}, budget: 2MB, default: 0.25}"
    )
    spec = run_setup(quickstart(f"sparse.tables.item={item}")).specs()["item"]
    assert (spec.admit_count, spec.admit_probability, spec.ttl_steps) == (3, 0.5, 40)
    assert (spec.evict, spec.budget_bytes, spec.default) == ("lru", 2_000_000, 0.25)
    assert not run_setup(quickstart()).specs()["item"].evicts


def test_a_time_to_live_is_the_steps_that_train_so_much_event_time():
    timed = quickstart("sparse.tables.item={evict: {ttl: 50d}}", "stages.pretrain.epochs=2")
    facts = {"train_span_s": 100 * DAY}
    with pytest.raises(
        ConfigError, match=r"item.evict.ttl: 50 days are 100 steps .* span 100.0 days in 200 steps"
    ):
        ttl_steps(timed, facts, {"pretrain": 400})
    once = quickstart("sparse.tables.item={evict: {ttl: 50d}}", "stages.pretrain.epochs=1")
    assert ttl_steps(once, facts, {"pretrain": 200}) == {"item": 100}
    longer = quickstart("sparse.tables.item={evict: {ttl: 150d}}", "stages.pretrain.epochs=2")
    assert ttl_steps(longer, facts, {"pretrain": 400}) == {"item": 300}
    assert ttl_steps(quickstart(), {}, {}) == {}


def test_tiers_reach_the_workers_and_one_that_says_nothing_is_refused():
    tiered = quickstart("sparse.tables.item={tiers: {device: 1GB, host_rows: 5000, folder: /scratch}}")
    assert run_setup(tiered).tiers == {
        "item": {"device_bytes": 10**9, "policy": "lfu", "host_rows": 5000, "folder": "/scratch"}
    }
    for tiers, said in (
        ("{policy: lru}", "give device or device_rows"),
        ("{host: 1GB, host_rows: 5}", "one of host"),
    ):
        with pytest.raises(ConfigError, match=said):
            quickstart(f"sparse.tables.item={{tiers: {tiers}}}")
