from __future__ import annotations

import re

import pytest
from views import RL, gpu_nodes, scenario

from nonet.controller.plan.memory import estimate_worker_memory
from nonet.controller.plan.planner import plan
from nonet.controller.plan.resolved import (
    count_hot_row_bytes,
    count_shard_bytes,
    derive_model_size,
    resolve_run,
)
from nonet.controller.scenario.scenario import load_scenario
from nonet.errors import PlacementError
from nonet.models.sid_decoder.spec import count_parameters

GB = 10**9
QWEN = {"use": "hf", "path": "s3://models/Qwen3-0.6B", "precision": "bf16"}
TOGETHER = {"trainer": {"pool": "gpu"}, "rollout": {"collocate": "trainer"}}


def rl(users: int = 8, **rollout: object) -> dict:
    return {
        "rl": {
            **RL,
            "users": users,
            "algorithm": {"use": "grpo"},
            "rollout": {"use": "beam", "width": 16, **rollout},
        }
    }


def test_parameters_are_those_of_the_real_module():
    from nonet.models.spec import build_model

    for codes, features, width, layers, options in (
        ([64, 64, 64], {"item": 32, "user": 32}, 64, 3, {}),
        ([64, 32, 16, 7], {"item": 16}, 32, 2, {}),
        ([300], {}, 16, 1, {}),
        ([64, 32, 16, 7], {"item": 16}, 32, 2, {"depth": "attention"}),
        ([300], {}, 24, 1, {"depth": "attention"}),
        ([64, 32, 16], {"item": 16}, 32, 2, {"block": "hstu", "length": 51}),
    ):
        config = {"use": "sid_decoder", "width": width, "layers": layers, "heads": 2, **options}
        model = build_model(config, codes, features, 7)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(
            codes, features, width, layers, heads=2, **options
        )


def test_a_plan_knows_the_size_of_the_model_that_the_scenario_asks_for():
    plain, depth, hstu = (
        derive_model_size(scenario(model={"use": "sid_decoder", **options}))
        for options in ({}, {"depth": "attention"}, {"block": "hstu"})
    )
    assert depth.parameters > plain.parameters > hstu.parameters
    assert depth.estimate_activation_bytes(100) > plain.estimate_activation_bytes(100)


def test_collocated_groups_that_fit_stay_resident():
    made = plan(scenario(model=QWEN, roles=TOGETHER, stages=rl()), gpu_nodes(1, memory_bytes=80 * GB))
    assert not made.ledger.list_offloading_lines()
    rollout, trainer = made.find_group("rollout"), made.find_group("trainer")
    assert (rollout.shares, rollout.nodes) == ("trainer", trainer.nodes)
    assert (trainer.devices, rollout.devices, trainer.bundle) == (0.5, 0.5, {"GPU": 1.0})


def test_groups_that_do_not_fit_together_take_turns_and_their_bytes_wait_in_host_memory():
    made = plan(scenario(model=QWEN, roles=TOGETHER, stages=rl(64)), gpu_nodes(1, memory_bytes=16 * GB))
    by_phase = {line.phase: line for line in made.ledger.lines if line.resource == "GPU"}
    assert by_phase["rollout"].offloaded == ("trainer",)
    assert not any(part.startswith("trainer.opt") for part in by_phase["rollout"].parts)
    host = next(line for line in made.ledger.lines if line.resource == "memory")
    # 2 bytes a weight, 12 of optimizer and master copy, 2 of the reference, 2 of gradients
    assert host.parts["trainer.offloaded"] == pytest.approx(
        18 * derive_model_size(scenario(model=QWEN)).parameters, rel=1e-6
    )
    assert all(line.needed <= line.capacity for line in by_phase.values())
    assert "groups take turns" in made.format_text()


def test_an_overlap_that_cannot_fit_is_refused_with_its_numbers_and_a_way_out():
    stages = rl(64, staleness=1)
    with pytest.raises(PlacementError) as caught:
        plan(scenario(model=QWEN, roles=TOGETHER, stages=stages), gpu_nodes(1, memory_bytes=16 * GB))
    text = str(caught.value)
    assert re.search(
        r"stage rl, rollout \+ update: each GPU of group 'trainer' would hold [\d.]+ GB, 14\.7 GB can be used",
        text,
    )
    assert "optimizer 7.15 GB" in text
    assert "staleness to 0" in text


def test_what_is_too_large_alone_is_refused_and_an_engine_that_divides_makes_it_fit():
    view = gpu_nodes(8, gpus=8, memory_bytes=40 * GB)
    big = {"use": "hf", "path": "Qwen3-4B", "precision": "bf16"}
    plain = {"trainer": {"pool": "gpu", "workers": 64}}
    with pytest.raises(PlacementError, match=r"optimizer 48\.2 GB.*\{use: fsdp2\}"):
        plan(scenario(model=big, roles=plain), view)
    parts = {}
    for engine in ({"use": "fsdp2"}, {"use": "deepspeed", "zero": 3}):
        sharded = {"trainer": {"pool": "gpu", "workers": 64, "engine": engine}}
        parts[engine["use"]] = (
            plan(scenario(model=big, roles=sharded), view).ledger.find_peak("pretrain", "trainer").parts
        )
    assert parts["fsdp2"]["trainer.weights"] < 4.02e9
    assert parts["deepspeed"]["trainer.optimizer"] == pytest.approx(4.02e9 * 8 / 64)
    assert parts["deepspeed"]["trainer.copy"] == pytest.approx(4.02e9 * 4 / 64)
    assert parts["deepspeed"]["trainer.weights"] == pytest.approx(4.02e9 * 2 / 64)  # as if all were in blocks


def test_a_chunk_is_halved_until_it_fits():
    view = gpu_nodes(1, memory_bytes=40 * GB)
    whole = {"pretrain": {"tokens": 1e9, "batch": {"tokens": 1e6}, "chunk": {"tokens": 1 << 18}}}
    made = plan(scenario(model=QWEN, roles={"trainer": {"pool": "gpu"}}, stages=whole), view)
    chunk = made.stages[1].derived["tokens a chunk"]
    line = made.ledger.find_peak("pretrain", "trainer")
    assert chunk == made.find_chunk("pretrain", "trainer") < 1 << 18
    assert (1 << 18) % chunk == 0
    assert line.needed <= line.capacity
    assert (
        2 * line.parts["trainer.activations"]
        + sum(value for part, value in line.parts.items() if part != "trainer.activations")
        > 0.75 * line.capacity
    ), "chunks twice as long would not have fitted"


def test_table_budgets_over_a_hosts_memory_are_refused():
    from nonet.controller.cluster.view import ClusterView, Node

    total = {"CPU": 8.0, "memory": 64e9}
    tables = {"item": {"budget": "100GB"}}
    with pytest.raises(PlacementError, match=r"node n would hold 10\d GB, 58\.9 GB can be used.*rows 100 GB"):
        plan(scenario(sparse={"tables": tables}), ClusterView((Node("n", total, dict(total)),)))
    two = ClusterView(
        tuple(Node(f"n{i}", {"CPU": 0.25, "memory": 64e9}, {"CPU": 0.25, "memory": 64e9}) for i in range(3))
    )
    made = plan(scenario(sparse={"tables": tables}, roles={"trainer": {"workers": 2}}), two)
    assert len(set(made.find_group("embedding").nodes)) == 2


def test_memory_that_the_view_does_not_know_is_said_and_not_checked():
    made = plan(scenario(model=QWEN, roles={"trainer": {"pool": "gpu"}}), gpu_nodes(1))
    assert made.ledger.find_peak("pretrain", "trainer").capacity == 0
    assert "not known: memory of GPU devices" in made.format_text()


def phases(made):
    body = made.stages["rl"]
    return body.kind.list_phases(body)


def test_with_staleness_rollout_and_update_are_one_phase():
    assert "rollout + update" in phases(scenario(stages=rl(staleness=1)))
    assert list(phases(scenario(stages=rl()))) == ["rollout", "score", "update", "publish"]


def test_tiers_bound_what_a_shard_keeps_in_memory_and_add_its_hot_rows():
    tiers = "sparse.tables.item={dim: 32, budget: 8GB, tiers: {device: 1GB, host: 3GB}}"
    tiered, _ = load_scenario("quickstart", [tiers])
    whole, _ = load_scenario("quickstart", ["sparse.tables.item={dim: 32, budget: 8GB}"])
    assert (count_hot_row_bytes(tiered), count_hot_row_bytes(whole)) == (1_000_000_000, 0)
    assert (count_shard_bytes(tiered, 2), count_shard_bytes(whole, 2)) == (3e9, 4e9)
    assert count_shard_bytes(tiered, 8) == 1e9  # the shard's part of the budget is less
    assert (
        estimate_worker_memory(resolve_run(tiered), "pretrain", ("trainer", "embedding"), 1, 0).fixed[
            "hot rows"
        ]
        == 1e9
    )
