from __future__ import annotations

import pytest

from nonet import yaml
from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.document.library import list_shipped_scenarios
from nonet.controller.scenario.options import resolve_stores
from nonet.controller.scenario.scenario import load_scenario, make_scenario, to_document
from nonet.errors import ConfigError


def wrong(*changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_scenario("quickstart", list(changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_yaml_is_1_2_core():
    text = "a: 1e-3\nb: on\nc: no\nd: 2026-11-19T00:00:00Z\ne: 30d\nf: true\ng: 010"
    assert yaml.parse(text) == {
        "a": 1e-3,
        "b": "on",
        "c": "no",
        "d": "2026-11-19T00:00:00Z",
        "e": "30d",
        "f": True,
        "g": 10,
    }


def test_yaml_error_names_the_line():
    with pytest.raises(ConfigError, match="line 2"):
        yaml.parse("a: [1\nb: 2")
    with pytest.raises(ConfigError, match="duplicate key"):
        yaml.parse("a: 1\na: 2")


@pytest.mark.parametrize("name", list_shipped_scenarios())
def test_every_shipped_scenario_plans_on_a_cluster_that_is_large_enough(name):
    scenario, _ = load_scenario(name)
    gpu = [
        Node(f"g{i}", {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}, {"zone": "a"}) for i in range(5)
    ]
    npu = [
        Node(f"n{i}", {"CPU": 192.0, "NPU": 8.0}, {"CPU": 192.0, "NPU": 8.0}, {"zone": "b"}) for i in range(5)
    ]
    made = plan(scenario, ClusterView((*gpu, *npu)))
    assert made == plan(scenario, ClusterView((*gpu, *npu)))
    assert [stage.name for stage in made.stages][1:-1] == list(scenario.stages)
    assert made.format_text().startswith(name)


@pytest.mark.parametrize("name", list_shipped_scenarios())
def test_a_resolved_scenario_reads_back_as_itself(name):
    scenario, _ = load_scenario(name)
    text = yaml.dump(to_document(scenario))
    assert yaml.dump(to_document(make_scenario(yaml.parse(text)))) == text


def test_shipped_quickstart_fits_on_a_page():
    _, folder = load_scenario("quickstart")
    assert len((folder / "quickstart.yaml").read_text().splitlines()) <= 60


def test_unknown_key_gets_a_suggestion():
    assert "data.histry: unknown key (did you mean 'history'?)" in wrong("data.histry=3")
    assert "stages.rl.algoritm: unknown key (did you mean 'algorithm'?)" in wrong("stages.rl.algoritm=3")
    assert "tokenizer.code: unknown key (did you mean 'codes'?)" in wrong("tokenizer.code=3")
    assert "sparse.tables.item.dimm: unknown key (did you mean 'dim'?)" in wrong("sparse.tables.item.dimm=3")


def test_wrong_types_and_sizes_say_what_was_given():
    assert "data.history: input should be greater than 0, got -1" in wrong("data.history=-1")
    assert "data.history: input should be a valid integer, got 'abc'" in wrong("data.history=abc")
    assert "seed: input should be a valid integer, got 1.5" in wrong("seed=1.5")
    assert "stages.pretrain.lr: input should be a valid number, got 'x'" in wrong("stages.pretrain.lr=x")
    assert "model: width 63 is not a multiple of heads 4" in wrong("model.width=63")


def test_a_map_where_a_number_may_stand_is_judged_as_a_map():
    assert "stages.pretrain.lr.warmup: input should be less than 1, got 2" in wrong(
        "stages.pretrain.lr={peak: 1e-3, warmup: 2}"
    )
    assert "stages.pretrain.lr.decay: input should be 'cosine'" in wrong(
        "stages.pretrain.lr={peak: 1e-3, decay: cosin}"
    )
    assert "roles.trainer.workers: min 3 is above max 1" in wrong(
        "roles={trainer: {workers: {min: 3, max: 1}}}"
    )
    assert "tokenizer.vectors: input should be a valid list, got 3" in wrong("tokenizer.vectors=3")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("stages.rl.best={least: 2}", "stages.rl.best.least: input should be less than or equal to 1, got 2"),
        ("stages.rl.best={leest: 1}", "stages.rl.best.leest: unknown key (did you mean 'least'?)"),
        ("stages.rl.control={lr: -1}", "stages.rl.control.lr: input should be greater than 0, got -1"),
        ("model.memory={width: 0}", "model.memory.width: input should be greater than 0, got 0"),
        ("model.memory={fade: 0.5, decay: 1}", "model.memory.decay: fade and decay both weigh"),
        ("model.memory={signals: [title, title]}", "model.memory.signals: name each signal once"),
        (
            "model.memory={voters: [nearest]}",
            "model.memory.voters: voters must be transitions, alone or with",
        ),
        (
            "stages.rl.rewards={hit: {weight: {start: 0, end: 1}}}",
            "stages.rl.rewards.hit.weight.steps: is required",
        ),
        ("stages.rl.rewards={float: {weight: {star: 0}}}", "stages.rl.rewards.float.weight."),
        ("stages.rl.optimizer=muonn", "stages.rl.optimizer.use: input should be 'muon', 'adamw' or 'keras'"),
        ("roles={trainer: {workers: {min: 3}}}", "roles.trainer.workers.max: is required and missing"),
        (
            "data.join={item: {use: a, columns: [1]}}",
            "data.join.item.columns.0: input should be a valid string",
        ),
    ],
)
def test_a_message_has_the_path_of_the_key_without_names_of_classes(change, told):
    assert told in wrong(change)


def test_what_wants_a_map_names_its_keys():
    assert "stages.rl.rewards.hit: wanted a map, got nothing; its keys: at_least, pool" in wrong(
        "stages.rl.rewards.hit="
    )
    assert "stages.pretrain: wanted a map, got 1; its keys: ahead, batch, chunk, epochs" in wrong(
        "stages.pretrain=1"
    )
    assert "stages.rl.rewards: wanted a map of names, got ['hit']" in wrong("stages.rl.rewards=[hit]")


def test_a_supervised_stage_with_steps_is_not_taken_for_one_of_rl():
    assert "stages.pretrain: give one of epochs, tokens and steps" in wrong("stages.pretrain.steps=3")


def test_a_key_of_another_use_is_not_suggested_to_itself():
    assert "model.hidden: is a key of another `use`" in wrong("model.hidden=[3]")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("algorithm={use: grpoo}", "algorithm 'grpoo' (did you mean 'grpo'?) does not exist"),
        (
            "algorithm={use: rloo, normalise: gdpo}",
            "normalise: is a key of another `use`: dapo, ecpo, gbpo, grpo",
        ),
        ("algorithm={use: rsft, normalise: grup}", "input should be 'group' or 'gdpo', got 'grup'"),
        ("rollout={use: beem}", "'beem' (did you mean 'beam'?) is neither shipped"),
        ("rollout={use: beam, temperature: 2}", "temperature: is a key of another `use`: sample"),
        ("rollout.width=0", "rollout.width: input should be greater than or equal to 2, got 0"),
        ("rewards={}", "name at least one"),
        ("rewards.hit.weight=one", "rewards.hit.weight: input should be a valid number, got 'one'"),
        ("rewards.hit.at_least=.nan", "rewards.hit.at_least: input should be a finite number"),
    ],
)
def test_what_an_rl_stage_cannot_have_is_one_line(change, told):
    line = wrong(f"stages.rl.{change}")
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "change",
    ["stages.pretrain.lr=.inf", "stages.rl.rewards.hit.weight=.nan", "stages.rl.algorithm.kl=.inf",
     "sparse.tables.item.lr=.inf", "stages.rl.algorithm.clip=.inf"],
)  # fmt: skip
def test_every_number_is_finite(change):
    assert "input should be a finite number" in wrong(change)


def test_a_clip_is_a_width_or_two_bounds():
    def grpo(clip):
        return f"stages.rl.algorithm={{use: grpo, clip: {clip}}}"

    assert "clip: list should have at least 2 items" in wrong(grpo([0.2]))
    assert "clip.0: input should be greater than 0, got -0.2" in wrong(grpo([-0.2, 0.2]))
    load_scenario("quickstart", [grpo([0.2, 0.28])])


def test_a_seed_fits_64_bits_and_something_is_measured():
    assert "seed: input should be less than" in wrong("seed=9223372036854775808")
    assert "evaluate.metrics: list should have at least 1 item" in wrong("evaluate.metrics=[]")


def test_a_pool_with_no_memory_is_refused():
    assert "pools.g.memory: input should be greater than 0" in wrong("pools={g: {memory: 0}}")


def test_the_decoder_s_parts_are_named_and_reach_the_workers():
    from nonet.controller.setup.worker_setup import make_run_setup

    assert "model.depth: input should be 'mlp' or 'attention', got 'gru'" in wrong("model.depth=gru")
    assert "model.block: input should be 'attention' or 'hstu', got 'HSTU'" in wrong("model.block=HSTU")
    told = {
        change: make_run_setup(load_scenario("quickstart", [change])[0]).model
        for change in ("model.depth=attention", "model.block=hstu")
    }
    assert told["model.depth=attention"]["depth"] == "attention"
    assert "length" not in told["model.depth=attention"]
    # HSTU divides by the longest sequence there can be: the history and the start before it.
    assert (told["model.block=hstu"]["block"], told["model.block=hstu"]["length"]) == ("hstu", 51)


def test_names_that_must_meet_are_checked():
    assert "roles.trainer.pool: there is no pool 'gpuu'" in wrong("roles.trainer.pool=gpuu")
    assert "there is no other role 'trainr' to share with" in wrong("roles.rollout={fuse: trainr}")
    assert "'rqkmeans' (did you mean 'rq_kmeans'?)" in wrong("tokenizer.use=rqkmeans")


def test_unknown_scenario_lists_the_shipped_ones():
    with pytest.raises(
        ConfigError,
        match=r"did you mean 'quickstart'.*shipped: amazon-sid, amazon-sid-rl, ctr, hf-tiny, nightly-feed, "
        "nightly-feed-laptop, quickstart",
    ):
        load_scenario("quickstrt")


def test_scenario_and_plan_import_neither_ray_nor_torch():
    import subprocess
    import sys

    modules = "nonet.controller.scenario.scenario, nonet.controller.plan.planner"
    code = f"import sys, {modules}; assert not {{'ray', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ([], ["muon", "muon", "muon"]),
        (["roles.trainer={engine: {use: deepspeed}}"], ["adamw", "adamw", "adamw"]),
        (["stages.finetune.optimizer=adamw"], ["muon", "adamw", "muon"]),
        (
            ["roles.trainer={engine: {use: deepspeed}}", "stages.rl.optimizer={use: muon}"],
            ["adamw", "adamw", "muon"],
        ),
        (
            ["roles.trainer={engine: {use: deepspeed}}", "stages.pretrain.optimizer={clip: 0.5}"],
            ["adamw", "adamw", "adamw"],
        ),
    ],
)
def test_an_engine_s_own_optimizer_is_the_default_and_one_that_is_named_stays(changes, used):
    scenario, _ = load_scenario("quickstart", changes)
    assert [stage.optimizer.use for stage in scenario.stages.values()] == used
    assert scenario.stages["pretrain"].optimizer.clip == (0.5 if "clip" in str(changes) else 1.0)


def test_an_optimizer_that_is_neither_is_told_what_there_is():
    with pytest.raises(ConfigError, match="input should be 'muon', 'adamw' or 'keras', got 'adamx'"):
        load_scenario("quickstart", ["stages.pretrain.optimizer=adamx"])


def test_a_relative_store_is_found_beside_the_scenario(tmp_path):
    (tmp_path / "shop" / "items.store").mkdir(parents=True)
    (tmp_path / "shop" / "users.lmdb").mkdir(parents=True)
    joins = {
        "item": {"use": "items.store", "columns": ["price"]},
        "user": {"use": "lmdb:users.lmdb", "columns": ["age"]},
        "shop": {"on": "item", "use": "nowhere", "columns": ["size"]},
        "far": {"on": "item", "use": "redis://cache:6379/x", "columns": ["stock"]},
    }
    document = {"data": {"join": joins, "sequences": {"use": "lmdb:users"}}}
    resolve_stores(document, tmp_path / "shop")
    assert document["data"]["sequences"] == {"use": f"lmdb:{tmp_path / 'shop' / 'users'}"}
    assert [join["use"] for join in document["data"]["join"].values()] == [
        str(tmp_path / "shop" / "items.store"),
        f"lmdb:{tmp_path / 'shop' / 'users.lmdb'}",
        "nowhere",
        "redis://cache:6379/x",
    ]
    resolve_stores({"data": {"join": {"item": 3}}}, tmp_path)  # the validation refuses it
    (tmp_path / "sources.json").touch()
    stored = {"data": {"sequences": {"use": "lmdb:users"}}}
    resolve_stores(stored, tmp_path)
    assert stored["data"]["sequences"]["use"] == "lmdb:users", "as a run of an earlier version has it"


def test_brackets_that_are_nested_too_deeply_are_one_line():
    for value in ("[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000):
        with pytest.raises(ConfigError, match=r"not valid YAML: brackets are nested too deeply"):
            load_scenario("quickstart", [f"data.where={value}"])


def test_aliases_that_stand_for_very_many_values_are_refused_at_once():
    bomb = "a0: &a0 [1, 2]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    with pytest.raises(ConfigError, match=r"stand for more than 1,000,000 values"):
        yaml.parse(bomb)
    assert yaml.parse("a: &a [1, 2]\nb: *a") == {"a": [1, 2], "b": [1, 2]}
