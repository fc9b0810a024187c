"""Stages that stop early on real Ray actors: the best commit goes on, whether roles are fused or apart, killed or not."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from safetensors.torch import load_file
from tests_ring import make_ring
from torch import equal

from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.deploy.opened import OpenedRun
from nonet.deploy.report import format_summary
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
# A rate at which the small world is soon known by heart.
EARLY = (
    *("evaluate.every=10", "stages.pretrain={epochs: 40, batch: {users: 10}, lr: {peak: 0.05, decay: none}}"),
    *("stages.pretrain.stop.patience=2", "checkpoint.keep.best=nats", "checkpoint.keep.last=1"),
)


def run(folder, name, *changes):
    panel = Panel(io.StringIO(), live=False)
    return api.run(api.scenario(folder / "ring.yaml", [*EARLY, *changes]), run_dir=folder / name, panel=panel)


def commits(finished) -> dict[str, dict[str, str]]:
    root = Checkpoints(finished.folder.checkpoints)
    return {
        stage: read_manifest(root.find_stage_end(stage)).files for stage in ("pretrain", "finetune", "rl")
    }


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    return folder, run(folder, "whole")


def test_a_stage_stops_early_and_what_follows_goes_on_from_its_best_commit(whole):
    _, finished = whole
    found = finished.report["validation"]["pretrain"]
    nats = [entry["nats"] for entry in found["history"]]
    steps = [entry["step"] for entry in found["history"]]
    assert found["best"] == steps[int(np.argmin(nats))] < found["ran"] < found["steps"] == 240
    assert steps == list(range(10, found["ran"] + 1, 10))
    ends = Checkpoints(finished.folder.checkpoints)
    pretrain, finetune = (read_manifest(ends.find_stage_end(stage)) for stage in ("pretrain", "finetune"))
    assert pretrain.step == pretrain.stage_step == found["best"]
    assert finetune.step - finetune.stage_step == found["best"]
    assert finished.report["detail"]["pretrain"]["valid"]["exhaustive"]["all"] == pytest.approx(
        found["history"][int(np.argmin(nats))]["metrics"]
    ), "the final evaluation sees the commit that was the best"
    assert "stopped after" in (finished.folder.path / "report.html").read_text()


def test_roles_apart_decide_the_same_to_the_same_bits(whole):
    folder, finished = whole
    apart = run(folder, "apart", APART)
    assert apart.report["validation"] == finished.report["validation"]
    for stage, files in commits(finished).items():
        dense = {name: digest for name, digest in files.items() if name.startswith("dense")}
        assert dense == {
            name: digest for name, digest in commits(apart)[stage].items() if name.startswith("dense")
        }


@pytest.mark.parametrize("after", [25, 45])
def test_a_stopped_run_resumes_to_the_same_decisions_and_bits(whole, after):
    folder, finished = whole
    started = api.start(api.scenario(folder / "ring.yaml", list(EARLY)), run_dir=folder / f"stopped-{after}")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not any(
        _step(path) >= after for path in started.folder.checkpoints.glob("step-*")
    ):
        time.sleep(0.05)
    started.stop()
    assert started.wait().state == "stopped"
    resumed = api.resume(started.folder.path)
    assert resumed.report["validation"] == finished.report["validation"]
    assert commits(resumed) == commits(finished)


def _step(path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


# A rate at which RL forgets what finetuning has learned, by a reward that nobody's next event earns.
HURTS = (
    "stages.pretrain.epochs=20",
    "stages.rl={steps: 20, users: 16, lr: 0.3, rollout: {width: 4}, algorithm: {use: grpo}, "
    "rewards: {own: {use: rewards/own.py, ceiling: 3}}}",
    "checkpoint.every=1000",
)


def hurt_run(folder, name, *changes):
    panel = Panel(io.StringIO(), live=False)
    return api.run(api.scenario(folder / "ring.yaml", [*HURTS, *changes]), run_dir=folder / name, panel=panel)


def weights(folder):
    return load_file(folder / "dense" / "model.safetensors")


def test_rl_that_hurts_selects_its_start_and_by_last_keeps_the_last_step(ray_local, tmp_path):
    folder = make_ring(tmp_path)
    hurt, kept = hurt_run(folder, "hurt"), hurt_run(folder, "kept", "stages.rl.best={by: last}")
    for finished, start in ((hurt, True), (kept, False)):
        ends = Checkpoints(finished.folder.checkpoints)
        newest, manifest = ends.find_newest()
        assert (manifest.stage, manifest.last, manifest.stage_step) == ("rl", True, 20)
        before, after = weights(ends.find_stage_end("finetune")), weights(newest)
        assert all(equal(before[name], after[name]) for name in before) is start
        published = OpenedRun.open(finished.folder.path).publish_newest()
        assert published.source["step"] == manifest.step
    report = hurt.report
    assert report["validation"]["rl"]["start"]
    assert report["validation"]["rl"]["guard"]["kept"] is False
    assert report["stages"]["rl"] == report["stages"]["finetune"]
    assert report["baselines"]["rl_unselected"]["recall@5"] < report["stages"]["rl"]["recall@5"]
    text = format_summary(report)
    assert "no step passed the guard" in text
    assert "the checkpoint that the stage began from was selected" in text
    assert "start" not in kept.report["validation"]["rl"]
    for name in ("rl_control", "rl_control_passes", "rl_rerank"):
        assert name in report["baselines"], name
