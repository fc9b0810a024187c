"""Plans and runs refuse the same scenarios: those that a user tried, and one wrong value for every key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests_ring import make_ring
from views import gpu_nodes

from nonet import yaml
from nonet.controller.cluster import read_local_view
from nonet.controller.plan.planner import plan
from nonet.controller.record import RunFolder
from nonet.controller.scenario import check_scenario
from nonet.controller.scenario.scenario import Scenario, load_scenario, make_scenario
from nonet.controller.setup import preflight, write_run
from nonet.errors import NonetError
from nonet.plugins import PluginFiles
from nonet.samples.stores import PackedStore

from .wrong_values import list_wrong_documents

# Wrong values that are right: a penalty, a floor and a default may be negative, an image may have any name, stores of
# sequences are created, and the pool has no workers whose interpreter is needed.
HARMLESS = {
    "data.sequences.use",
    "sparse.tables.*.default",
    "pools.*.env.python",
    "pools.*.env.image",
    "stages.*.<reinforced>.rewards.*.weight",
    "stages.*.<reinforced>.rewards.*.weight.start",
    "stages.*.<reinforced>.rewards.*.weight.end",
    "stages.*.<reinforced>.rewards.*.at_least",
}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 256}
CLICKS = {
    "model": {"use": "deepfm"},
    "stages": {"train": {"epochs": 1, "batch": {"tokens": 64}, "target": "rating >= 4"}},
    "evaluate": {"metrics": ["auc"]},
}


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return make_ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture
def document(ring, monkeypatch):
    monkeypatch.chdir(ring)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return yaml.read(ring / "ring.yaml")


def refusals(document, folder) -> tuple[str | None, str | None]:
    """Return why a run and `nonet plan` refuse a document, None if they do not; other errors are not caught."""
    try:
        scenario = make_scenario(document, files=PluginFiles(str(folder)))
    except NonetError as error:
        return str(error), str(error)
    return _refuse(lambda: preflight.check(scenario, folder)), _refuse(lambda: _plan(scenario, folder))


def _plan(scenario: Scenario, folder):
    plan(scenario, read_local_view())
    preflight.check_files(scenario, folder)


def _refuse(check) -> str | None:
    try:
        check()
    except NonetError as error:
        return str(error)
    return None


def test_a_plan_refuses_every_wrong_value_that_a_run_refuses(ring, document):
    assert refusals(document, ring) == (None, None)
    accepted = set()
    for key, value, changed in list_wrong_documents(document):
        by_run, by_plan = refusals(changed, ring)
        if by_run is None:
            accepted.add(key)
        elif key != "storage":
            assert by_plan is not None, (key, value, by_run)
            assert "\n" not in by_plan
    assert accepted == HARMLESS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages.pretrain.target": "nope >= 4"}, "nope"),
        ({"stages.rl.rewards.own.use": "rewards/none.py"}, "there is no file"),
        ({"stages.rl.rewards.own.cieling": 3}, "no option 'cieling'"),
        ({"stages.rl.rewards.own.ceiling": "abc"}, "the option ceiling is 'abc'"),
        ({"data.join": {"item": {"use": "none", "columns": ["price"]}}}, "there is no store"),
        ({"data.join": {"item": {"use": "texts", "columns": ["price"]}}}, "keys are text"),
        pytest.param(
            {"model": {"use": "hf", "config": GPT2, "lora": {"targets": ["nope"]}}},
            "no layer 'nope'",
            marks=pytest.mark.slow,  # imports transformers
        ),
        ({**CLICKS, "sparse": {"tables": {"nope": {"dim": 8}}}}, "nope"),
        ({**CLICKS, "sparse": {"tables": {"rating": {"dim": 8}}}}, "is the label"),
        ({"model.memory": {"events": ["nope"]}}, "has no event 'nope'"),
        ({"stages.rl.rollout.catalogue": "in_stock"}, "in_stock"),
        ({"stages.rl.rewards.click": {"use": "ctr", "model": "none"}}, "there is no run 'none'"),
        ({"stages.rl.rewards.diversity": {"column": "nope"}}, "column 'nope'"),
        ({"stages.tokenise": {"epochs": 1}}, "reserved names"),
        ({"roles": {"evaluator": {"engine": "ddp"}}}, "a run has one engine"),
        ({"roles": {"evaluator": {"workers": {"min": 3, "max": 2}}}}, "min"),
        ({"roles": {"mine": {}}}, "must name its kind"),
        ({"data.split": {"use": []}}, "wanted one of leave_last_out, time"),
        ({"data.events": {"compress": 1e30}}, "data.events.compress"),
        ({"model": {"use": "hf", "path": ""}}, "give one of path"),
        ({"stages.align": {"use": "align", "epochs": 1}}, "it has no words"),
        ({"stages.rl.precision": {"use": "bf16"}}, "in a stage that rolls out"),
        ({"evaluate.every": 10**6}, "only ends of stages"),
        (
            {"data.join": {"item": {"use": "redis://none:1/p", "columns": ["a"], "options": {"db": "x"}}}},
            "the option db is 'x'",
        ),
    ],
)
def test_what_follows_from_the_scenario_and_its_files_is_refused_by_both(ring, document, changes, said):
    if not (ring / "texts").exists():
        store = PackedStore.create(ring / "texts", pa.schema([("price", pa.float64())]), key=pa.string())
        store.put(pa.array(["a"]), pa.table({"price": np.ones(1)}))
    for path, value in changes.items():
        *parents, key = path.split(".")
        part = document
        for parent in parents:
            part = part[parent]
        part[key] = value
    by_run, by_plan = refusals(document, ring)
    assert by_run == by_plan
    assert by_plan is not None
    assert said in by_plan


def test_a_plan_opens_nothing_that_is_elsewhere_and_lists_it(ring, document, monkeypatch):
    document["data"]["interactions"] = "s3://none/events.parquet"
    document["data"]["join"] = {"item": {"use": "redis://none:1/prices", "columns": ["price"]}}
    document["stages"]["rl"]["rewards"]["fresh"] = {"use": "http://none:1/fresh"}
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("an address was opened"))
    scenario = make_scenario(document, files=PluginFiles(str(ring)))
    plan(scenario, gpu_nodes(1))
    assert sorted(preflight.check_files(scenario, ring).unchecked) == [
        "data.interactions: s3://none/events.parquet",
        "data.join.item.use: redis://none:1/prices",
        "stages.rl.rewards.fresh: http://none:1/fresh",
    ]


def test_a_run_refuses_a_reward_whose_server_is_not_started(ring, document):
    document["stages"]["rl"]["rewards"]["fresh"] = {"use": "http://127.0.0.1:1/fresh"}
    with pytest.raises(
        NonetError, match=r"http://127\.0\.0\.1:1/fresh cannot be reached: .*; start the server"
    ):
        preflight.check(make_scenario(document, files=PluginFiles(str(ring))), ring)


def test_an_absent_absolute_path_is_refused_unless_the_run_is_on_another_machine(ring, document):
    document["data"]["interactions"] = "/none/events.parquet"
    scenario = make_scenario(document, files=PluginFiles(str(ring)))
    with pytest.raises(NonetError, match=r"/none/events\.parquet"):
        preflight.check_files(scenario, ring)
    checks = preflight.check_files(scenario, ring, allows_absent=True)
    assert checks.unchecked == ["data.interactions: /none/events.parquet"]


def test_a_resumed_run_is_checked_without_its_tables(ring, document, tmp_path):
    store = PackedStore.create(tmp_path / "prices", pa.schema([("price", pa.float64())]), key=pa.int64())
    store.put(pa.array([1000]), pa.table({"price": np.ones(1)}))
    document["data"]["join"] = {"item": {"use": str(tmp_path / "prices"), "columns": ["price"]}}
    run = RunFolder(tmp_path / "run")
    write_run(make_scenario(document, files=PluginFiles(str(ring))), ring, run)
    scenario, _ = load_scenario(run.scenario)
    scenario = scenario.model_copy(
        update={"data": scenario.data.model_copy(update={"interactions": "/none/events.parquet"})}
    )
    preflight.check_resumed(scenario, run)
    (tmp_path / "prices").rename(tmp_path / "gone")
    with pytest.raises(NonetError, match=r"data\.join\.item: .*there is no store"):
        preflight.check_resumed(scenario, run)


def test_a_table_above_the_limit_is_read_in_part_only(ring, document, monkeypatch):
    monkeypatch.setattr(preflight, "_MAX_TABLE_BYTES", 1)
    monkeypatch.setattr(
        "nonet.workers.roles.artifacts.DataSetup.build", lambda _: pytest.fail("the table was read")
    )
    document["stages"]["rl"]["rewards"]["diversity"] = {"column": "nope"}
    scenario = make_scenario(document, files=PluginFiles(str(ring)))
    check_scenario(scenario)
    with pytest.raises(NonetError, match="column 'nope'"):
        preflight.check_files(scenario, ring)
