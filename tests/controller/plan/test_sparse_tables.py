from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.flops import _WIRE
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.scenario.sparse import Numbers, Sparse
from nonet.controller.scenario.table_options import check_tables, compute_ttl_steps
from nonet.controller.setup.worker_setup import make_run_setup
from nonet.embedding.exchange.codecs import get_codec
from nonet.embedding.tables.factory import make_table
from nonet.embedding.tables.optimizers import get_row_optimizer
from nonet.embedding.tables.spec import FORMATS, TableSpec
from nonet.embedding.tiers import TieredTable, TierSettings
from nonet.errors import ConfigError

DAY = 86400.0


def quickstart(*changes):
    return load_scenario("quickstart", list(changes))[0]


def test_a_table_s_policy_reaches_its_spec():
    item = (
        "{dim: 16, admit: {count: 3, probability: 0.5}, evict: {ttl_steps: 40}, budget: 2MB, default: 0.25}"
    )
    spec = make_run_setup(quickstart(f"sparse.tables.item={item}")).make_table_specs()["item"]
    assert (spec.admit_count, spec.admit_probability, spec.ttl_steps) == (3, 0.5, 40)
    assert (spec.evict, spec.budget_bytes, spec.default) == ("lru", 2_000_000, 0.25)
    assert not make_run_setup(quickstart()).make_table_specs()["item"].evicts


def test_an_optimizer_s_settings_reach_the_spec_from_the_table_or_the_defaults():
    own = "sparse.tables.item={optimizer: ftrl, l1: 0.5, l2: 0, eps: 2.0, clip: 1.5, dtype: bf16}"
    every = "sparse.defaults={dim: 32, dtype: fp16, optimizer: adamw, weight_decay: 0.1, clip: 3.0}"
    specs = make_run_setup(quickstart(own, every, "sparse.tables.user={clip: 0}")).make_table_specs()
    item, user = specs["item"], specs["user"]
    assert (item.optimizer, item.l1, item.l2, item.eps) == ("ftrl", 0.5, 0.0, 2.0)
    assert (item.clip, item.dtype, item.weight_decay) == (1.5, "bf16", 0.1)
    assert (user.optimizer, user.clip, user.dtype, user.weight_decay, user.eps) == (
        "adamw",
        0.0,
        "fp16",
        0.1,
        None,
    )


def test_a_scenario_may_name_every_format_of_the_engine():
    names = ["adagrad", "adam", "adamw", "ftrl", "rowwise_adagrad", "sgd"]
    with pytest.raises(ConfigError, match=f"choose one of: {', '.join(names)}, or refer to"):
        get_row_optimizer("none")
    assert get_args(Numbers) == FORMATS


def test_a_time_to_live_is_the_steps_that_train_so_much_event_time():
    timed = quickstart("sparse.tables.item={evict: {ttl: 50d}}", "stages.pretrain.epochs=2")
    facts = {"train_span_s": 100 * DAY}
    with pytest.raises(
        ConfigError, match=r"item.evict.ttl: 50 days are 100 steps .* span 100.0 days in 200 steps"
    ):
        compute_ttl_steps(timed, facts, {"pretrain": 400})
    once = quickstart("sparse.tables.item={evict: {ttl: 50d}}", "stages.pretrain.epochs=1")
    assert compute_ttl_steps(once, facts, {"pretrain": 200}) == {"item": 100}
    longer = quickstart("sparse.tables.item={evict: {ttl: 150d}}", "stages.pretrain.epochs=2")
    assert compute_ttl_steps(longer, facts, {"pretrain": 400}) == {"item": 300}
    assert compute_ttl_steps(quickstart(), {}, {}) == {}


def test_the_wire_reaches_the_workers_and_the_plan_and_another_one_is_refused():
    assert make_run_setup(quickstart()).wire == "fp32"
    assert make_run_setup(quickstart("sparse.wire=int8")).wire == "int8"
    with pytest.raises(ConfigError, match=r"sparse.wire: .*fp64"):
        quickstart("sparse.wire=fp64")


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
def test_the_planner_counts_the_bytes_of_a_row_as_the_wire_does(wire):
    assert [_WIRE[wire](dim) for dim in (1, 8, 64)] == [get_codec(wire).row_bytes(dim) for dim in (1, 8, 64)]


def test_tiers_reach_the_workers_and_one_that_says_nothing_is_refused():
    tiered = quickstart("sparse.tables.item={tiers: {device: 1GB, host_rows: 5000, folder: /scratch}}")
    assert make_run_setup(tiered).tiers == {
        "item": {"device_bytes": 10**9, "policy": "lfu", "host_rows": 5000, "folder": "/scratch"}
    }
    for tiers, said in (
        ("{policy: lru}", "give device or device_rows"),
        ("{host: 1GB, host_rows: 5}", "one of host"),
    ):
        with pytest.raises(ConfigError, match=said):
            quickstart(f"sparse.tables.item={{tiers: {tiers}}}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "sparse.tables.item.budget=10",
            "sparse.tables.item: a budget of 10 bytes holds no row: one takes 160",
        ),
        ("sparse.tables.item.dim=5000", "sparse.tables.item: a sparse table's dim can be at most 4096"),
        (
            "sparse.tables.item.features=[itemm]",
            "no feature 'itemm'; there are item, user. Did you mean 'item'?",
        ),
        ("sparse.tables={sku: {dim: 8}}", "no feature 'sku'"),
        (
            "sparse.tables.item.l1=0.5",
            "sparse.tables.item: l1 and l2 are settings of ftrl, and rowwise_adagrad has neither",
        ),
        ("sparse.tables.item.features=[user]", "feature 'user' also belongs to table 'item'"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused_before_anything_starts(change, said):
    with pytest.raises(ConfigError, match=said):
        check_tables(quickstart(change))
    with pytest.raises(ConfigError, match=said):
        plan(quickstart(change), ClusterView((Node("n", {"CPU": 8.0}, {"CPU": 8.0}),)))


def test_a_budget_of_one_row_is_the_least():
    check_tables(quickstart("sparse.tables.item.budget=160"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("budget=0", "budget: input should be greater than 0"),  # 0 would be no budget at all
        ("evict={}", "evict: give by with a budget, ttl or ttl_steps"),
        ("admit={}", "admit: give count or probability"),
        ("features=[]", "features: list should have at least 1 item"),
        ("tiers={device: 0}", "tiers.device: input should be greater than 0"),
    ],
)
def test_a_table_s_option_that_would_do_nothing_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        quickstart(f"sparse.tables.item.{change}")


def test_a_time_to_live_needs_a_supervised_stage_to_count_its_steps():
    alone = "stages={rl: {steps: 3, rewards: {hit: {}}}}"
    with pytest.raises(
        ConfigError, match=r"item.evict.ttl is counted in steps of the first supervised stage"
    ):
        check_tables(quickstart(alone, "sparse.tables.item={evict: {ttl: 50d}}"))
    check_tables(quickstart(alone, "sparse.tables.item={evict: {ttl_steps: 50}}"))


OWN = """
import numpy as np
from nonet.plug import RowOptimizer

def climb(rows, state, grads, step):
    state += 1
    rows += np.float32(step.lr) * grads * state

CLIMB = RowOptimizer(climb, extra=1)
SHORT = RowOptimizer(lambda rows: None)
"""


def test_a_table_steps_with_an_optimizer_from_a_file_on_host_and_device(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    spec = TableSpec(2, optimizer=f"{tmp_path}/own.py:CLIMB", lr=0.5, init_scale=0.0)
    host = make_table("item", spec, 0)
    device = TieredTable.from_host(make_table("item", spec, 0), TierSettings(device_rows=4))
    for table in (host, device):
        for step in (1, 2):
            table.lookup(np.array([7]), train=True, step=step)
            table.apply(np.array([7]), torch.tensor([[1.0, -2.0]]), step)
        assert table.lookup(np.array([7]), train=False).tolist() == [[1.5, -3.0]]


def test_an_optimizer_that_breaks_its_contract_is_refused_where_the_scenario_is_read(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    document = {"tables": {"item": {"optimizer": f"{tmp_path}/own.py:SHORT"}}}
    with pytest.raises(
        ValidationError, match=r"own.py\): rule does not accept .*; see docs/how-to/extend.md"
    ):
        Sparse.model_validate(document)
