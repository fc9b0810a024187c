"""Folders that commit fe1e6d5 left behind open today: report, compare, recommend, evaluate, serve, export, resume, plug in."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
from exhibits import NAMES, open_exhibit
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.controller.record import Checkpoints, RunFolder, find_run
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup, make_stage_setups
from nonet.deploy.after import compare_runs, evaluate_run, recommend_for
from nonet.deploy.opened import OpenedRun
from nonet.deploy.report import format_summary, write_report
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.deploy.serving.offline import Exported, export_run
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.errors import ConfigError
from nonet.rl.rewards import load_reward
from nonet.samples.stores import open_store
from nonet.workers.roles import RolloutRequest, UpdateRequest
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.rollout import Rollout
from nonet.workers.roles.trainer import Trainer
from nonet.workers.runtime.worker import Place

RUNS = ("shop", "clicks", "hugging_face", "mine")
RECOMMENDERS = ("shop", "hugging_face", "mine")


@pytest.fixture(scope="module")
def museum(tmp_path_factory):
    """Each exhibit in a folder of its own, by name."""
    root = tmp_path_factory.mktemp("museum")
    return {name: open_exhibit(name, root / name) for name in NAMES}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_is_written_again(museum, name):
    folder = museum[name] / name
    before = json.loads((folder / "report.json").read_text())
    page = write_report(folder)
    assert page.exists()
    assert before["name"] in page.read_text()
    assert format_summary(json.loads((folder / "report.json").read_text()))


def test_a_run_is_compared_with_itself_and_nothing_differs(museum):
    run = str(museum["shop"] / "shop")
    answer = compare_runs(run, run)
    assert all(metric["diff"] == 0 for metric in answer["metrics"].values())


@pytest.mark.parametrize("name", RECOMMENDERS)
def test_a_user_gets_a_list_of_every_stage(museum, name):
    answer = recommend_for(str(museum[name] / name), [], "user_003", 5)
    stages = set(load_scenario(museum[name] / name / "scenario.yaml")[0].stages)
    assert stages <= set(answer["columns"])
    assert all(len(titles) == 5 for titles in answer["columns"].values())


@pytest.mark.parametrize("name", RECOMMENDERS)
def test_checkpoints_rank_the_test_events_as_they_did(museum, name):
    folder = museum[name] / name
    before = json.loads((folder / "report.json").read_text())
    answer = evaluate_run(str(folder))
    for stage, metrics in before["stages"].items():
        assert answer["subjects"][stage]["recall@5"] == pytest.approx(metrics["recall@5"])


def test_a_run_is_served_with_its_two_versions_and_the_events_that_were_posted(museum):
    run = museum["shop"] / "shop"
    opened = OpenedRun.open(run)
    assert opened.registry.list_versions() == [1, 2]
    app = build_single_process_app(str(run), ServeConfig(deadline_s=20.0), True)
    try:
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
            answer = ask(client, user="user_001", k=3, explain=True)
            assert answer["fallback"] is None
            assert len(items(answer)) == 3
            assert answer["history"][-1] == "thing d3"  # posted to the version of before
            assert not ask(client, user="stranger", k=3)["cold_start"]
    finally:
        app.state.service.engines.close()


@pytest.mark.parametrize("name", ["shop", "hugging_face"])
def test_a_run_is_exported_and_the_export_of_before_opens(museum, tmp_path, name):
    export_run(str(museum[name] / name), tmp_path / "export")
    made = Exported(tmp_path / "export")
    kept = Exported(museum["exports"] / ("export" if name == "shop" else "export_hugging_face"))
    history = ["SKU-0001", "SKU-0002"]
    lists = [[item for item, _, _ in each.recommend(history, k=5)] for each in (made, kept)]
    assert lists[0] == lists[1]


def test_a_packed_store_answers(museum):
    store = open_store(str(museum["store"] / "discounts.store"))
    values, offsets = store.multi_get(["SKU-0003", "none"], ["discount"], as_of=[1_700_100_000] * 2)
    assert np.diff(offsets).tolist() == [1, 0]
    assert 0 <= values["discount"][0].as_py() <= 1


def test_a_click_model_is_a_reward_and_no_recommender(museum):
    run = museum["clicks"] / "clicks"
    assert load_reward("ctr", museum["clicks"], {"model": str(run)}, name="click")
    for verb in (lambda: recommend_for(str(run), [], "user_003", 5), lambda: OpenedRun.open(run)):
        with pytest.raises(ConfigError, match="clicks"):
            verb()


def test_a_run_that_was_stopped_inside_rl_trains_on_from_its_checkpoint(museum):
    folder = RunFolder(museum["stopped"] / "stopped")
    path, manifest = Checkpoints(folder.checkpoints).find_newest()
    assert (manifest.stage, manifest.last) == ("rl", False)
    scenario, _ = load_scenario(folder.scenario)
    facts = folder.read_facts()
    run, data = make_run_setup(scenario), facts["data"]
    stages = make_stage_setups(scenario, data["users"], data["trained_events"])
    shard, trainer, rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
    trainer.place = Place(role="trainer", peers={"embedding": shard})
    rollout.place = Place(role="rollout", peers={"trainer": trainer, "embedding": shard})
    for role in (trainer, rollout):
        role.open(folder.find_artifacts())
    trainer.load(str(path), stages["rl"])
    shard.load(str(path))
    rollout.apply(1)
    users, positions = rollout.lease("rl", manifest.stage_step, stages["rl"].users)
    asked = {"stage": "rl", "step": manifest.stage_step, "width": 4, "version": 1}
    beams = rollout.generate(users, positions, RolloutRequest(**asked))
    scores = {name: beams["valid"].astype(np.float32) for name in ("hit", "own")}
    record = trainer.update(UpdateRequest(stages["rl"], manifest.stage_step), beams, scores)
    assert record["kl_exact"] > 0


def test_a_run_works_after_its_folder_was_moved(museum, tmp_path):
    shutil.copytree(museum["shop"], tmp_path / "here")
    shutil.move(tmp_path / "here" / "shop", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "here" / "data")
    for path in RunFolder(tmp_path / "elsewhere").find_artifacts().values():
        assert str(path).startswith(str(tmp_path / "elsewhere"))
    assert recommend_for(str(tmp_path / "elsewhere"), [], "user_003", 5)["columns"]


def test_artifacts_are_written_relative_to_the_run(tmp_path):
    run = RunFolder(tmp_path / "run")
    place = run.path / "artifacts" / "sids-1"
    place.mkdir(parents=True)
    run.write_facts({"artifacts": {"sids": {"kind": "sids", "path": str(place), "sha256": ""}}})
    stored = json.loads((run.path / "results" / "tokenise.json").read_text())
    assert stored["artifacts"]["sids"]["path"] == "artifacts/sids-1"
    run.path.rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").find_artifacts() == {
        "sids": str(tmp_path / "moved/artifacts/sids-1")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "mine"])
def test_runs_are_resumed_to_their_report_on_ray(no_ray, museum, tmp_path, name):
    """The stopped run goes on inside RL; the plug-ins of docs/how-to/extend.md as they were written for fe1e6d5 train again."""
    folder = museum[name]
    if name == "stopped":
        text = (folder / name / "scenario.yaml").read_text()
        done = api.resume(str(folder / name))
        assert "steps: 400" in text
    else:
        done = api.run(
            api.scenario(folder / "mine.yaml", []),
            run_dir=tmp_path / "again",
            panel=Panel(io.StringIO(), live=False),
        )
    assert find_run(str(done.folder.path)).report.exists()
