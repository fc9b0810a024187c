"""What `init` names, and what it is refused for."""

from __future__ import annotations

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet import yaml
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.validations import ValidationRecord
from nonet.controller.scenario.document.library import find_scenario
from nonet.controller.scenario.scenario import load_scenario, make_scenario, to_document
from nonet.controller.setup.from_run import find_warm_start, resolve_sources, set_initial_run
from nonet.controller.setup.own_files import keep_copies
from nonet.controller.setup.worker_setup import make_stage_setups
from nonet.errors import ConfigError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(tmp_path))
    return tmp_path


def finished(runs, name="quickstart-1", ends=("pretrain", "finetune"), scenario=None):
    """Make a run's folder with what another run reads of it."""
    run = RunFolder(runs / name)
    (run.path / "sequences").mkdir(parents=True)
    run.scenario.write_text(yaml.dump(to_document(scenario or quickstart())))
    artifacts = {kind: {"path": str(run.path / kind)} for kind in ("sequences", "sids")}
    run.write_json("results/tokenise.json", {"artifacts": artifacts, "tokenizer": {"codes": [64, 64, 64, 3]}})
    checkpoints = Checkpoints(run.checkpoints)
    for number, stage in enumerate(ends):
        step = 100 * (number + 1)
        where = {"stage": stage, "stage_step": step, "last": True, "version": 0}
        manifest = Manifest(run.id, step, **where, scenario="", artifacts={}, participants={}, journal=0)
        checkpoints.complete(checkpoints.create_staging_dir(step), manifest, {})
    return run


def quickstart(*changes):
    return load_scenario("quickstart", list(changes))[0]


def test_without_init_nothing_is_looked_for():
    scenario = quickstart()
    assert resolve_sources(scenario) is scenario
    assert find_warm_start(scenario) is None


def test_a_run_keeps_to_the_files_of_its_start_while_their_folder_grows(tmp_path):
    day = pa.table({"user_id": [1], "item_id": [[1, 2]]})
    for name in ("day-2", "day-1"):
        pq.write_table(day, tmp_path / f"{name}.parquet")
    scenario = resolve_sources(
        quickstart(f"data.source={{use: parquet, path: '{tmp_path}/day-*.parquet', items: item_id}}")
    )
    pq.write_table(day, tmp_path / "day-0.parquet")
    files = [str(tmp_path / f"day-{number}.parquet") for number in (1, 2)]
    assert to_document(scenario)["data"]["source"]["path"] == files
    assert resolve_sources(make_scenario(to_document(scenario))) == scenario


def test_init_means_the_last_stage_that_ended_and_is_settled_to_a_folder(runs):
    run = finished(runs)
    scenario = resolve_sources(quickstart("init.from=quick"))
    assert to_document(scenario)["init"] == {"from": str(run.path), "stage": "finetune", "train": "all"}
    start = find_warm_start(scenario)
    assert (start.stage, start.step, start.known.codes) == ("finetune", 200, (64, 64, 64, 3))
    assert start.commit == str(run.checkpoints / "step-000200")
    assert start.as_dict() == {"run": run.id, "stage": "finetune", "commit": start.commit, "step": 200}
    assert make_scenario(to_document(scenario)) == scenario, "what a run stores means the same"


def test_a_session_s_from_run_is_init(runs):
    finished(runs)
    named = resolve_sources(quickstart("init.from=last", "init.stage=pretrain"))
    assert set_initial_run(quickstart(), "last", "pretrain") == named
    assert find_warm_start(named).step == 100


def test_a_run_or_stage_that_is_not_there_is_named(runs):
    finished(runs, ends=("pretrain",))
    with pytest.raises(ConfigError, match="there is no run 'other'"):
        resolve_sources(quickstart("init.from=other"))
    with pytest.raises(ConfigError, match=r"init: .*no checkpoint that ends the stage 'finetune'"):
        find_warm_start(quickstart("init.from=last", "init.stage=finetune"))
    finished(runs, "quickstart-2", ends=())
    with pytest.raises(ConfigError, match="has finished none of its stages pretrain, finetune, rl"):
        resolve_sources(quickstart("init.from=quickstart-2"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.width=32", "model.width is 32 here and was 64 in quickstart-1"),
        ("tokenizer.codes=32", "tokenizer.codes is 32 here and was 64"),
        ("sparse.tables.item.dim=16", "sparse.tables.item.dim is 16 here and was 32"),
        ("sparse.tables.user.optimizer=adam", "sparse.tables.user.optimizer is 'adam' here and was"),
    ],
)
def test_what_would_not_fit_is_named_with_what_it_was(runs, change, says):
    finished(runs)
    with pytest.raises(ConfigError, match=says):
        find_warm_start(quickstart("init.from=last", change))


def test_a_run_with_the_same_own_optimizer_can_be_continued_from_its_copies(runs, tmp_path_factory):
    """The copy in the run's folder has another path than the original."""
    folder = tmp_path_factory.mktemp("mine") / "quickstart"
    shutil.copytree(find_scenario("quickstart").parent, folder)
    own = folder / "own.py"
    own.write_text(
        "from nonet.plug import RowOptimizer\n\n\ndef climb(rows, state, grads, step):\n    rows += grads\n\n\n"
        "CLIMB = RowOptimizer(climb, extra=1)\n"
    )
    source = str(folder / find_scenario("quickstart").name)
    change = "sparse.tables.user.optimizer='own.py:CLIMB'"
    run = finished(runs, scenario=load_scenario(source, [change])[0])
    keep_copies(*load_scenario(source, [change]), run)
    again, _ = load_scenario(source, [change, "init.from=last"])
    assert find_warm_start(again).step == 200
    other, _ = load_scenario(source, ["init.from=last"])
    with pytest.raises(ConfigError, match=r"user.optimizer is 'rowwise_adagrad' here and was 'own.py:CLIMB'"):
        find_warm_start(other)


def test_dropout_may_differ(runs):
    finished(runs)
    assert find_warm_start(quickstart("init.from=last", "model.dropout=0.3")) is not None


def test_a_feature_with_a_table_only_in_the_other_run_is_named_with_the_key_to_set(runs):
    finished(runs)
    scenario = quickstart("init={from: last}", "sparse.tables={item: {dim: 32}}")
    with pytest.raises(
        ConfigError, match=r"the feature 'user' has no sparse table here .* Set sparse\.tables as in"
    ):
        find_warm_start(scenario)


def test_a_continued_run_starts_from_the_newest_finished_run_of_its_name(runs):
    for number, (name, is_finished) in enumerate(
        [("quickstart-1", True), ("quickstart-2", True), ("quickstart-3", False)]
    ):
        run = finished(runs, name)
        os.utime(run.scenario, (number, number))
        if is_finished:
            run.write_json("report.json", {})
    other = finished(runs, "zoo", scenario=make_scenario({**to_document(quickstart()), "name": "zoo"}))
    other.write_json("report.json", {})
    scenario = resolve_sources(quickstart("init.from=last", "init.train=new"))
    assert scenario.init.source == str(runs / "quickstart-2")
    assert resolve_sources(quickstart("init.from=last")).init.source == str(runs / "zoo"), "as before"
    start = find_warm_start(scenario)
    assert start.known.replay == 0.2
    assert start.keeps_optimizer
    assert start.as_dict()["keeps_optimizer"] is True
    assert find_warm_start(resolve_sources(quickstart("init.from=quickstart-2"))).known.replay is None


def test_a_continued_run_of_a_name_without_finished_runs_is_refused(runs):
    finished(runs, "quickstart-1")
    with pytest.raises(
        ConfigError, match=r"init.from: last: no run of quickstart has finished; `nonet run --continue last`"
    ):
        resolve_sources(quickstart("init.from=last", "init.train=new"))


def test_a_source_that_names_its_files_trains_on_what_it_names(runs, tmp_path):
    finished(runs)
    pq.write_table(pa.table({"user_id": [1], "item_id": [[1, 2]]}), tmp_path / "day.parquet")
    changes = (
        "init={from: quickstart-1, train: new}",
        f"data.source={{use: parquet, path: '{tmp_path}/day.parquet'}}",
    )
    with pytest.raises(
        ConfigError, match=r"init.train: new: data.source: parquet reads the files that it names"
    ):
        find_warm_start(quickstart(*changes))


@pytest.mark.parametrize("option", ["replay: 0.5", "rate: 0.5"])
def test_options_of_continued_runs_are_refused_for_others(option):
    with pytest.raises(
        ConfigError, match=r"only runs with train: new have it; add train: new, or leave it out"
    ):
        quickstart(f"init={{from: last, {option}}}")


def test_another_optimizer_begins_anew(runs):
    finished(runs).write_json("report.json", {})
    changes = "init={from: last, train: new}", "stages.pretrain.optimizer=adamw"
    assert not find_warm_start(resolve_sources(quickstart(*changes))).keeps_optimizer


def test_a_continued_stage_has_a_constant_share_of_its_peak_rate():
    plain = make_stage_setups(quickstart(), 100, 1000)
    continued = make_stage_setups(quickstart("init={from: last, train: new}"), 100, 1000)
    for name, stage in plain.items():
        rates = [continued[name].lr.compute_rate(step, 50) for step in range(50)]
        if stage.rolls_out:
            assert continued[name].lr == stage.lr
        else:
            assert set(rates) == {0.1 * stage.lr.peak}
    assert continued["pretrain"].base == plain["pretrain"].base, "rows learn at a share of their rate, too"


def test_a_run_whose_stages_all_ended_as_they_began_has_learned_nothing(runs):
    run = finished(runs)
    run.write_json("report.json", {})
    facts = run.read_json("results/tokenise.json")
    facts["artifacts"]["targets"] = {"path": str(run.path / "targets")}
    run.write_json("results/tokenise.json", facts)
    scenario = quickstart("init={from: quickstart-1, train: new}")
    for rejected_stages in ((), ("finetune",), ("pretrain", "finetune")):
        for name in ("pretrain", "finetune"):
            start = {"selected": True} if name in rejected_stages else None
            ValidationRecord(run, name).close(
                metric="nats", best=1, ran=1, steps=1, **({"start": start} if start else {})
            )
        warm_start = find_warm_start(resolve_sources(scenario))
        assert (warm_start.known.rejected is not None) == (len(rejected_stages) == 2)
        assert warm_start.keeps_optimizer == (not rejected_stages)


def test_a_supervised_stage_after_rl_begins_with_a_new_optimizer(runs):
    finished(runs, ends=("pretrain", "finetune", "rl")).write_json("report.json", {})
    changes = "init={from: last, train: new}", "stages.rl.optimizer=muon", "stages.pretrain.optimizer=muon"
    assert not find_warm_start(resolve_sources(quickstart(*changes))).keeps_optimizer


def test_another_engine_begins_with_a_new_optimizer(runs):
    finished(runs).write_json("report.json", {})
    changes = "init={from: last, train: new}", "roles.trainer.engine={use: fsdp2}"
    assert not find_warm_start(resolve_sources(quickstart(*changes))).keeps_optimizer


def test_a_length_in_tokens_is_refused_for_a_continued_run(runs):
    finished(runs)
    changes = "init={from: quickstart-1, train: new}", "stages.pretrain={tokens: 1e6}"
    with pytest.raises(
        ConfigError, match=r"init.train: new: stages.pretrain.tokens is the same for few new events"
    ):
        find_warm_start(quickstart(*changes))
