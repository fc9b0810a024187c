"""What is computed at once is planned, told to the workers and counted; what nobody runs is marked and refused."""

from __future__ import annotations

import pytest
from backbones import QWEN3
from views import RL, gpu_nodes, node, scenario

from nonet.controller.cluster.view import ClusterView
from nonet.controller.plan.memory import estimate_usual_share, estimate_worker_memory
from nonet.controller.plan.planner import plan
from nonet.controller.plan.resolved import derive_model_size, resolve_run
from nonet.controller.scenario import check_scenario
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.worker_setup import make_stage_setups
from nonet.errors import ConfigError, PlacementError

GB = 10**9


def test_on_a_device_with_less_room_a_chunk_is_smaller_and_counted_so():
    asked = scenario(
        stages={"pretrain": {"epochs": 1, "batch": {"users": 512}}, "rl": {**RL, "users": 4096}},
        roles={"trainer": {"pool": "gpu"}},
    )
    wide, tight = (plan(asked, gpu_nodes(1, memory_bytes=size)) for size in (80 * GB, 1_800_000_000))
    for stage, part in (("pretrain", "activations"), ("rl", "activations"), ("rl", "beams")):
        role = "rollout" if part == "beams" else "trainer"
        assert tight.find_chunk(stage, role) <= wide.find_chunk(stage, role)
        peak = max(line.parts.get(f"trainer.{part}", 0) for line in tight.ledger.lines if line.stage == stage)
        assert 0 < peak < 0.1 * GB
    assert tight.find_chunk("pretrain", "trainer") < wide.find_chunk("pretrain", "trainer") == 1 << 14


def test_the_ledger_counts_a_whole_chunk_however_few_users_a_step_has():
    lines = [
        plan(
            scenario(stages={"pretrain": {"epochs": 1, "batch": {"users": users}}}), gpu_nodes(1)
        ).ledger.lines[-1]
        for users in (1, 64)
    ]
    assert lines[0].parts["trainer.activations"] == lines[1].parts["trainer.activations"] > 0.1 * GB


def test_a_plan_refuses_all_keys_that_do_not_go_together_in_one_message():
    asked = scenario(
        roles={
            "evaluator": {"engine": "ddp"},
            "trainer": {"engine": {"use": "deepspeed", "offload": "optimizer"}},
        }
    )
    with pytest.raises(ConfigError) as caught:
        plan(asked, gpu_nodes(1))
    for key in (
        "roles.trainer.engine: deepspeed with offload: optimizer on device cpu",
        "roles.evaluator.engine (a run has one engine: roles.trainer.engine)",
    ):
        assert key in str(caught.value)


def test_a_click_models_step_is_one_batch_and_a_chunk_of_it_is_refused():
    clicks = {"model": {"use": "deepfm"}, "sparse": {"tables": {"item": {}}}}
    stage = {"epochs": 1, "target": "rating > 3", "batch": {"tokens": 256}}
    plain = scenario(**clicks, stages={"pretrain": stage}, evaluate={"metrics": ["auc"]})
    assert plan(plain, gpu_nodes(1)).find_chunk("pretrain", "trainer") is None
    with pytest.raises(ConfigError, match=r"stages\.pretrain\.chunk: a step of deepfm is one batch"):
        check_scenario(
            scenario(
                **clicks,
                stages={"pretrain": {**stage, "chunk": {"tokens": 1000}}},
                evaluate={"metrics": ["auc"]},
            )
        )


def test_a_chunk_holds_at_least_one_window():
    with pytest.raises(
        ConfigError, match=r"stages\.pretrain\.chunk\.tokens: 51 is less than one window.* at least 52"
    ):
        scenario(stages={"pretrain": {"epochs": 1, "chunk": {"tokens": 51}}})


def test_workers_are_told_the_chunk_that_the_plan_names():
    asked = scenario(stages={"pretrain": {"epochs": 1}, "rl": {**RL, "users": 1000}})
    told = make_stage_setups(asked, 100, 1000)
    assert told["pretrain"].chunk == 1 << 14
    prompt = 51 + 16 * 3  # a full history and its start, and the codes of 16 beams
    assert told["rl"].chunk == (1 << 14) // prompt
    made = plan(asked, gpu_nodes(1))
    chunks = {name: made.find_chunk(name, "trainer") for name in asked.stages}
    assert (
        chunks
        == {"pretrain": 1 << 14, "rl": (1 << 14) // prompt}
        == {name: setup.chunk for name, setup in make_stage_setups(asked, 100, 1000, chunks).items()}
    )
    assert make_stage_setups(asked, 100, 1000, {"pretrain": 70})["pretrain"].chunk == 70


def test_copies_of_the_weights_that_an_engine_keeps_are_counted():
    """Check the copies of each engine.

    ZeRO keeps its part of the weights once more in fp32. A step of ZeRO 1 makes three copies of it when it needs no gradients;
    four ranks need fewer bytes for them than for the gradients.
    """
    parts = {}
    for engine in ("ddp", "fsdp2", "deepspeed", "deepspeed, zero: 3"):
        made, _ = load_scenario("quickstart", [f"roles.trainer={{engine: {{use: {engine}}}}}"])
        for ranks in (1, 2, 4):
            found = estimate_worker_memory(resolve_run(made), "pretrain", ("trainer",), ranks, 0.0)
            parts[engine, ranks] = found.fixed.get("copy", 0.0), found.working.get("copies", 0.0)
    weights = derive_model_size(made).parameters * 4.0
    nothing = (0.0, 0.0)
    assert {parts[engine, 1] for engine, _ in parts} == {nothing}
    assert parts["ddp", 4] == parts["fsdp2", 4] == nothing
    assert parts["deepspeed", 2] == (0.5 * weights, 0.5 * weights)
    assert parts["deepspeed", 4] == (0.25 * weights, 0.0)
    assert parts["deepspeed, zero: 3", 4] == (0.25 * weights, 0.0)


def test_a_worker_of_a_mesh_keeps_a_part_of_the_shard_axis():
    found = {}
    for engine, workers in (("fsdp2", 2), ("fsdp2, replicate: 2", 4)):
        change = f"roles.trainer={{workers: {workers}, engine: {{use: {engine}}}}}"
        made, _ = load_scenario("quickstart", [change])
        found[engine] = estimate_worker_memory(resolve_run(made), "rl", ("trainer",), workers, 0.0)
    assert found["fsdp2"].fixed == found["fsdp2, replicate: 2"].fixed
    planned = plan(made, gpu_nodes(1))
    assert planned.meshes["trainer"].startswith("replicate 2 x shard 2; a worker keeps weights")
    assert f"mesh of trainer: {planned.meshes['trainer']}" in planned.format_text()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ("workers: 3, engine: {use: fsdp2, replicate: 2}", "replicate: 2 and workers: 3 .*multiple of 2"),
        (
            "workers: {min: 2, max: 4}, engine: {use: fsdp2, replicate: 2}",
            "replicate and workers from 2 to 4",
        ),
    ],
)
def test_a_mesh_that_the_workers_do_not_fill_is_refused(trainer, message):
    scenario, _ = load_scenario("quickstart", [f"roles.trainer={{{trainer}}}"])
    with pytest.raises(ConfigError, match=message):
        check_scenario(scenario)


SUPERVISED = {"pretrain": {"epochs": 1, "batch": {"users": 512}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"heads": 3, "width": 66}}, "tensor: 2 and model.heads: 3 .*multiple of 2"),
        ({"model": {"block": "hstu"}}, "model.block: hstu"),
        ({"engine": {"compile": True}}, "compile: true"),
        ({"workers": 3}, "tensor: 2 and workers: 3"),
        (
            {"stages": {"pretrain": {"epochs": 1, "roles": {"trainer": {"workers": 3}}}}},
            r"stages\.pretrain\.roles\.trainer with engine fsdp2, tensor: 2 and workers: 3",
        ),
        ({"model": {"use": "hf", "config": QWEN3 | {"num_key_value_heads": 1}}}, "num_key_value_heads: 1"),
        ({"model": {"use": "hf", "config": QWEN3, "lora": {"rank": 2}}}, r"model\.lora"),
        (
            {"model": {"use": "hf", "config": {"model_type": "gpt2", "n_head": 4, "n_embd": 32}}},
            "model_type gpt2",
        ),
    ],
)
def test_what_tensor_parallelism_does_not_support_is_refused_in_a_plan(changes, message):
    engine = {"use": "fsdp2", "tensor": 2, **changes.pop("engine", {})}
    roles = {"trainer": {"workers": changes.pop("workers", 4), "engine": engine}}
    made = scenario(**{"stages": SUPERVISED, "roles": roles, **changes})
    with pytest.raises(ConfigError, match=message):
        check_scenario(made)


def test_a_tensor_rank_keeps_a_part_of_the_blocks_and_all_other_weights():
    found = {}
    for engine in ({"use": "fsdp2"}, {"use": "fsdp2", "tensor": 2}):
        made = scenario(stages=SUPERVISED, roles={"trainer": {"workers": 4, "engine": engine}})
        found[len(engine)] = estimate_worker_memory(resolve_run(made), "pretrain", ("trainer",), 4, 0.0)
    size = derive_model_size(made)
    whole = size.parameters - size.matrices
    assert found[1].fixed["weights"] == size.parameters * 4 / 4
    assert found[2].fixed["weights"] == (whole + size.matrices // 2) * 4 / 2
    assert plan(made, gpu_nodes(1)).meshes["trainer"].startswith("shard 2 x tensor 2; ")


def test_prompts_of_an_rl_step_are_divided_among_tensor_groups():
    sizes = {}
    for tensor in (1, 2):
        trainer = {"workers": 4, "engine": {"use": "fsdp2", "tensor": tensor}}
        made = scenario(
            stages={"pretrain": {"epochs": 1}, "rl": {**RL, "users": 40}}, roles={"trainer": trainer}
        )
        derived = next(stage for stage in plan(made, gpu_nodes(1)).stages if stage.name == "rl").derived
        sizes[tensor] = [derived[name] for name in ("users a rollout", "prompts a trainer's chunk")]
        assert estimate_usual_share(resolve_run(made), "rl", 4) == 10 * tensor
    assert sizes == {1: [10, 10], 2: [20, 20]}


@pytest.mark.parametrize("owner", ["trainer", "evaluator"])
def test_a_tensor_group_is_placed_on_one_node_and_a_warning_says_where_it_does_not_fit(owner):
    """Also where the trainers use the devices of another group."""
    trainer = {"workers": 6, "engine": {"use": "fsdp2", "tensor": 2}, "pool": "gpu"}
    roles = {"trainer": trainer}
    if owner == "evaluator":
        roles = {"trainer": {**trainer, "collocate": "evaluator"}, "evaluator": {"workers": 6, "pool": "gpu"}}
    made = scenario(stages=SUPERVISED, roles=roles)
    for free, nodes, warns in ((3, "aabbcc", False), (1, "abcdef", True)):
        view = ClusterView(tuple(node(name, {"GPU": free}, GPU=4, CPU=8) for name in "abcdef"))
        found = plan(made, view)
        assert "".join(found.find_group("trainer").nodes) == nodes
        assert any("tensor groups on several nodes" in note for note in found.notes) == warns


def test_only_fsdp2_has_a_mesh_and_its_axes_are_at_least_1():
    for engine in ("fsdp2, replicate: 0", "ddp, replicate: 2", "deepspeed, replicate: 2"):
        with pytest.raises(ConfigError, match=r"engine\.replicate"):
            load_scenario("quickstart", [f"roles.trainer={{workers: 4, engine: {{use: {engine}}}}}"])


def test_an_engine_that_divides_weights_keeps_a_part_and_gathers_a_few_blocks():
    """So do RL steps, whose rollouts and exact metrics gather no more than a supervised step."""
    changes = ["model.layers=48", "model.width=128", "roles.trainer={engine: {use: fsdp2}}"]
    made, _ = load_scenario("quickstart", [*changes, "stages.rl.algorithm={use: grpo, kl: 0.1}"])
    run = resolve_run(made)
    found = {stage: estimate_worker_memory(run, stage, ("trainer",), 4, 0.0) for stage in ("pretrain", "rl")}
    weights = derive_model_size(made).learned * 4.0
    for memory in found.values():
        assert memory.fixed["weights"] == memory.fixed["gradients"] == weights / 4
        assert memory.working["gathered weights"] < 0.5 * weights
    assert found["rl"].fixed["reference"] == weights / 4


def test_zero_3_keeps_the_weights_around_the_blocks_whole():
    made, _ = load_scenario("quickstart", ["roles.trainer={engine: {use: deepspeed, zero: 3}}"])
    memory = estimate_worker_memory(resolve_run(made), "pretrain", ("trainer",), 4, 0.0)
    size = derive_model_size(made)
    around = size.learned - size.matrices
    assert 0 < around < size.learned
    assert memory.fixed["weights"] == (around + size.matrices / 4) * 4
    assert memory.fixed["gradients"] == memory.fixed["copy"] == size.learned * 4 / 4
    assert memory.fixed["optimizer"] == size.learned * 8 / 4


def test_several_evaluators_of_a_divided_model_keep_a_part_of_it():
    changes = ["model.layers=48", "model.width=128"]
    for engine, workers, share in (("fsdp2", 8, 8), ("fsdp2", 1, 1), ("ddp", 8, 1)):
        made, _ = load_scenario("quickstart", [*changes, f"roles.trainer={{engine: {{use: {engine}}}}}"])
        memory = estimate_worker_memory(resolve_run(made), "pretrain", ("evaluator",), workers, 0.0)
        weights = derive_model_size(made).parameters * 4.0
        assert memory.fixed["weights"] == weights / share
        assert sum(memory.fixed.values()) <= weights


def test_gathered_weights_are_counted_on_devices_while_trainers_or_rollouts_compute():
    trainer = {"pool": "gpu", "workers": 2, "engine": {"use": "fsdp2"}}
    asked = scenario(stages={"rl": RL}, roles={"trainer": trainer})
    lines = {line.phase: line.parts for line in plan(asked, gpu_nodes(1)).ledger.lines}
    assert lines["rollout"]["trainer.gathered weights"] == lines["update"]["trainer.gathered weights"] > 0
    assert "trainer.gathered weights" not in lines["score"]


def test_an_evaluator_whose_device_is_too_small_for_the_model_is_told_to_divide_it():
    fsdp2 = {"pool": "gpu", "workers": 8, "engine": {"use": "fsdp2", "recompute": True}}
    model = {"width": 1024, "layers": 24}

    def make_plan(evaluators):
        roles = {"trainer": fsdp2, "evaluator": {"pool": "gpu", "workers": evaluators}}
        stages = {"pretrain": {"epochs": 1, "batch": {"users": 8}, "chunk": {"tokens": 64}}}
        return plan(
            scenario(model=model, roles=roles, stages=stages), gpu_nodes(4, memory_bytes=int(2.9 * GB))
        )

    with pytest.raises(
        PlacementError, match=r"each GPU of group 'evaluator'.*Give roles.evaluator more workers"
    ):
        make_plan(1)
    assert make_plan(4).find_group("evaluator").workers == 4


def test_an_optimizer_in_host_memory_is_counted_there():
    gpu = {"pool": "gpu", "workers": 2}
    here, aside = (
        plan(
            scenario(roles={"trainer": gpu | {"engine": {"use": "deepspeed", "zero": 3} | more}}),
            gpu_nodes(1),
        )
        for more in ({}, {"offload": "optimizer"})
    )
    parameters = derive_model_size(scenario()).parameters
    assert here.ledger.find_peak("pretrain", "trainer").parts["trainer.optimizer"] == parameters * 8 / 2
    assert "trainer.optimizer" not in aside.ledger.find_peak("pretrain", "trainer").parts
    host = next(line for line in aside.ledger.lines if line.place == "host")
    assert host.parts["trainer.optimizer"] == 2 * parameters * 16 / 2


def test_sparse_rows_that_a_reference_needs_as_they_were_are_counted():
    def kept(table, **rl):
        asked = scenario(
            stages={"rl": {**RL, "steps": 100, "users": 64, **rl}},
            data={
                "interactions": "events.parquet",
                "history": 50,
                "split": {"use": "leave_last_out", "rl": 2},
            },
            sparse={"tables": {"item": {"dim": 16, **table}}},
        )
        return estimate_worker_memory(resolve_run(asked), "rl", ("trainer",), 2, 0).fixed

    rows = "rows before they changed"
    dpo = {"algorithm": {"use": "dpo"}, "sparse_lr": 1e-3}
    assert kept({}, **dpo)[rows] == 100 * 64 * 50 * (16 * 4 + 8)
    assert kept({"budget": "1MB"}, **dpo)[rows] == 1_000_000
    every = {"use": "dpo", "reference": {"every": 10}}
    assert kept({}, **dpo | {"algorithm": every})[rows] == 10 * 64 * 50 * (16 * 4 + 8)
    for frozen in ({"algorithm": {"use": "dpo"}}, {"sparse_lr": 1e-3}):
        assert rows not in kept({}, **frozen), "no row changes, or there is no reference"


def test_versions_that_rollouts_are_compared_with_are_counted():
    asked = scenario(
        stages={
            "rl": {**RL, "sparse_lr": 1e-3, "mismatch": {}, "rollout": {"staleness": 2}},
        },
        sparse={"tables": {"item": {"dim": 16}}},
    )
    size = derive_model_size(asked)
    fixed = estimate_worker_memory(resolve_run(asked), "rl", ("trainer",), 1, 0).fixed
    assert fixed["old versions"] == 3 * size.parameters * 4
    assert fixed["rows before they changed"] == 3 * RL["users"] * asked.data.history * (16 * 4 + 8)


def test_a_reference_that_is_renewed_takes_as_much_as_one_that_stays():
    def count_reference_bytes(**options):
        asked = scenario(stages={"rl": {**RL, "steps": 100, "algorithm": {"use": "dpo", **options}}})
        return estimate_worker_memory(resolve_run(asked), "rl", ("trainer",), 2, 0).fixed.get("reference")

    assert count_reference_bytes() == count_reference_bytes(reference={"every": 10}) > 0
