"""A tiny scenario from tables to report on real Ray actors: whole, interrupted, with every role apart, and by hand."""

from __future__ import annotations

import io
import json
import threading
import time
import urllib.request

import numpy as np
import pytest
import ray

import nonet
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder, lock_run
from nonet.controller.record.tracking.kinds.prometheus import FAMILIES
from nonet.controller.scenario.scenario import load_scenario
from nonet.deploy.after.recommend import format_columns, recommend_for
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.errors import ConfigError, WorkerFailed

APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
COMPARED = ("stages", "detail", "baselines", "paired", "rewards", "users", "tokenizer", "data", "rows")


def run(folder, name, *changes):
    panel = Panel(io.StringIO(), live=False)
    return api.run(api.scenario(folder / "ring.yaml", list(changes)), run_dir=folder / name, panel=panel)


def last_commit(run) -> dict[str, str]:
    path, _ = Checkpoints(run.folder.checkpoints).find_newest()
    return read_manifest(path).files


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    """One finished run of the ring scenario, shared by the tests below."""
    from tests_ring import make_ring

    folder = make_ring(tmp_path_factory.mktemp("ring"))
    return folder, run(folder, "whole")


def test_a_prometheus_that_scrapes_the_node_of_the_controller_gets_the_metrics_of_a_run(whole):
    _, finished = whole
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60.0  # Ray's processes report every few seconds
    exported: dict[str, float] = {}
    while exported.get("nonet_run_active") != 0.0:
        assert time.monotonic() < deadline, exported
        with urllib.request.urlopen(address, timeout=10) as response:
            lines = response.read().decode().splitlines()
        own = [
            line for line in lines if line.startswith("ray_nonet_") and f'run="{finished.folder.id}"' in line
        ]
        exported = {
            line.partition("{")[0].removeprefix("ray_"): float(line.rpartition(" ")[2]) for line in own
        }
        time.sleep(0.5)
    optional = {name for name in FAMILIES if "storage" in name or "skipped" in name or "unsent" in name}
    assert exported.keys() == FAMILIES.keys() - optional
    assert exported["nonet_checkpoint_bytes"] > 10_000
    assert exported["nonet_checkpoints_total"] >= 3
    assert exported["nonet_run_restarts"] == exported["nonet_run_failed"] == 0


def test_a_run_leaves_everything_it_promises(whole):
    _, finished = whole
    report = finished.report
    assert finished.state == "done"
    assert set(report["stages"]) == {"pretrain", "finetune", "rl"}
    beside = {"rl_control", "rl_control_passes", "rl_rerank"}
    baselines = {"popularity", "transition_counter", "attribute_counter"}
    assert baselines | beside == set(report["baselines"]) - {"rl_unselected", "finetune_unselected"}
    assert {"rl-finetune", "rl-rl_control", "finetune-transition_counter"} <= set(report["paired"])
    assert set(report["rewards"]) == {"hit", "own", "total"}
    assert set(report["detail"]["rl"]["test"]) == {"exhaustive", "beam"}
    assert report["rows"]["pretrain"] == 3 * 60 * 12
    assert report["peak_rss_bytes"] > 0
    there = {path.name for path in finished.folder.path.iterdir()}
    assert {
        "scenario.yaml",
        "plan.json",
        "journal.jsonl",
        "trace.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "report.html",
        "report.json",
    } <= there
    assert "<script" not in (finished.folder.path / "report.html").read_text()


def test_the_model_learns_the_ring(whole):
    _, finished = whole
    assert (
        finished.report["stages"]["finetune"]["recall@10"]
        > 1.5 * finished.report["baselines"]["popularity"]["recall@10"]
    )


def test_every_step_is_applied_once_in_the_journal(whole):
    _, finished = whole
    applied = [record["applied"] for record in read_journal(finished.folder.journal) if "applied" in record]
    assert applied == list(range(len(applied)))


@pytest.mark.slow
def test_every_role_in_its_own_process_gives_the_same_bits(whole):
    _same_bits(whole, "apart", APART)


@pytest.mark.slow
def test_collocated_rollout_gives_the_same_bits(whole):
    found = _same_bits(whole, "collocated", "roles={rollout: {collocate: trainer}}")
    groups = {group["name"]: group for group in found.folder.read_json("plan.json")["groups"]}
    assert groups["rollout"]["shares"] == "trainer"


@pytest.mark.slow
def test_groups_that_take_turns_in_a_stage_of_its_own_roles_give_the_same_bits(whole):
    found = _same_bits(
        whole,
        "turns",
        "pools={small: {memory: 6.2MB}}",
        "roles={trainer: {pool: small}}",
        "stages.rl.roles={rollout: {collocate: trainer}}",
    )
    moved = found.report["moved"]
    assert moved["rollout"]["offload"] >= 4, "it makes room for every update"
    assert moved["trainer"]["offload"] >= 4, "and gets it for every rollout"
    assert moved["trainer"]["bytes"] > 8 * 4e6
    events = json.loads((found.folder.path / "trace.json").read_text())
    moves = {
        (e["name"], e["args"].get("bytes", 0) > 1e6)
        for e in events
        if e["name"].endswith(("offload", "resume"))
    }
    assert moves == {
        (f"{who}{what}", True) for who in ("", "trainer.", "rollout.") for what in ("offload", "resume")
    }
    assert "rebind rl" in found.report["wall_s"]
    (rebound,) = (r for r in read_journal(found.folder.journal) if "rebound" in r)
    assert (rebound["rebound"], rebound["starts"]) == ("rl", {"trainer": 1, "rollout": 1})


def _same_bits(whole, name, *changes):
    folder, finished = whole
    other = run(folder, name, *changes)
    assert {key: other.report[key] for key in COMPARED} == {key: finished.report[key] for key in COMPARED}
    assert last_commit(other) == last_commit(finished)
    return other


def test_the_trace_has_a_lane_for_the_controller_and_every_worker(whole):
    _, finished = whole
    events = json.loads((finished.folder.path / "trace.json").read_text())
    lanes = {event["args"]["name"].partition("@")[0] for event in events if event["ph"] == "M"}
    assert {"controller", "trainer-0", "evaluator-0", "rl.reward.hit-0", "rl.reward.own-0"} <= lanes
    worked = {event["name"] for event in events if event["ph"] == "X"}
    assert {"pretrain", "pretrain.train", "rl.update", "commit", "publish", "trainer.update"} <= worked
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert all(0 <= share <= 1 for share in finished.report["idle"].values())
    assert finished.report["bytes_out"]["trainer"] > 0


def test_a_stopped_run_resumes_to_the_same_bits(whole):
    folder, finished = whole
    started = api.start(api.scenario(folder / "ring.yaml"), run_dir=folder / "stopped")
    stopper = threading.Thread(target=_stop_after_a_commit, args=(started,))
    stopper.start()
    started.wait(Panel(io.StringIO(), live=False))
    assert started.wait() is started  # what has ended answers again
    started.stop()
    stopper.join()
    assert started.state == "stopped"
    assert not (folder / "stopped" / "report.json").exists()
    resumed = api.resume(folder / "stopped", panel=Panel(io.StringIO(), live=False))
    assert {key: resumed.report[key] for key in COMPARED} == {key: finished.report[key] for key in COMPARED}
    assert last_commit(resumed) == last_commit(finished)
    with pytest.raises(ConfigError, match="is finished"):
        api.resume(folder / "stopped")


@pytest.mark.slow
def test_two_trainers_equal_one_up_to_the_order_of_sums(whole):
    folder, finished = whole
    two = run(
        folder,
        "two",
        "roles={trainer: {workers: 2}, rollout: {fuse: trainer}, embedding: {fuse: trainer}}",
    )
    losses = [_losses(each.folder) for each in (finished, two)]
    assert losses[0].keys() == losses[1].keys()
    # float32 sums in another order drift by 1e-6 here; RL is left out, where a drift may choose another beam
    drift = {step: abs(losses[0][step] - losses[1][step]) for step in losses[0] if step[0] != "rl"}
    assert max(drift.values()) < 1e-4, drift


@pytest.mark.slow
def test_elastic_evaluators_rank_as_one_does(whole):
    folder, finished = whole
    several = run(folder, "several", "roles={evaluator: {workers: {min: 1, max: 3}}}")
    plan = json.loads((several.folder.path / "plan.json").read_text())
    assert [group["workers"] for group in plan["groups"] if "evaluator" in group["roles"]] == [3]
    assert {key: several.report[key] for key in COMPARED} == {key: finished.report[key] for key in COMPARED}


@pytest.mark.slow
def test_two_trainers_measure_the_same_kl_to_the_start_where_sparse_rows_learn_too(whole):
    folder, _ = whole
    learns = (
        "stages.rl.algorithm={use: grpo, kl: 0.1}",
        "stages.rl.sparse_lr=0.01",
        "stages.rl.steps=6",
        "stages.rl.control=false",
    )
    apart = "rollout: {workers: 1}, embedding: {workers: 1}"
    one, two = (
        run(folder, name, *learns, f"roles={{trainer: {{workers: {count}}}, {apart}}}")
        for name, count in (("kl of one", 1), ("kl of two", 2))
    )
    first, second = _kl_exact(one.folder), _kl_exact(two.folder)
    assert len(first) == 6
    assert first[-1] > 1e-4, "the policy moved"
    assert second == pytest.approx(first, rel=0.01, abs=1e-6)


def test_recommendations_come_from_every_stage(whole):
    _, finished = whole
    answer = recommend_for(str(finished.folder.path), ["item b1", "item c2"], None, 5)
    assert list(answer["columns"]) == ["popularity", "transition_counter", "pretrain", "finetune", "rl"]
    assert all(
        len(titles) == 5 and not {"item b1", "item c2"} & set(titles) for titles in answer["columns"].values()
    )
    assert "popularity" in format_columns(answer)
    assert len(recommend_for(str(finished.folder.path), [], "103", 3)["history"]) == 16
    for like, user, said in (
        (["itm b1"], None, "close: item b1"),
        ([], "nobody", "there is no user 'nobody'"),
        ([], None, "give either"),
    ):
        with pytest.raises(ConfigError, match=said):
            recommend_for(str(finished.folder.path), like, user, 5)


def test_another_scenario_may_not_use_the_folder(whole):
    folder, _ = whole
    for change in ("seed=6", "seed=5"):  # nor may the same one, begun again
        with pytest.raises(ConfigError, match="holds a finished run"):
            run(folder, "whole", change)
    assert (folder / "whole" / "report.json").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no price')", "reward 'own' failed for users .*no price"),
        pytest.param(
            "return item[:, :1]",
            r"reward 'own' returned .*shape \[\d+, 1\].*wanted numbers of shape",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "return item * float('nan')", "reward 'own' returned nan for user", marks=pytest.mark.slow
        ),
    ],
)
def test_a_broken_reward_fails_before_training_and_leaves_nothing(whole, body, said):
    folder, _ = whole
    good = (folder / "rewards" / "own.py").read_text()
    (folder / "rewards" / "own.py").write_text(
        f"import nonet\n\n\n@nonet.reward\ndef own(item, *, ceiling: float):\n    {body}\n"
    )
    try:
        with pytest.raises(WorkerFailed, match=said) as caught:
            run(folder, "broken")
    finally:
        (folder / "rewards" / "own.py").write_text(good)
    assert caught.value.exit_code == 2
    assert not (folder / "broken").exists()


@pytest.mark.slow
def test_a_loop_of_ones_own_has_the_same_guarantees(whole):
    folder, _ = whole
    _, beside = load_scenario(folder / "ring.yaml")
    seen = []
    with nonet.Session(folder / "ring.yaml", folder=beside, run=RunFolder(folder / "own")) as s:
        for step, prompts in s.iterate_prompts("rl"):
            beams = s.rollout.generate(prompts)
            record = s.trainer.update(s.stage, step, beams, s.reward.score(beams))
            s.publish()
            s.commit(step)
            seen.append(record["prompts"])
        with pytest.raises(ConfigError, match="is being run by another process"):
            lock_run(s.run)
    lock_run(s.run).close()
    assert seen == [8.0] * 4
    assert Checkpoints(folder / "own" / "checkpoints").find_stage_end("rl").name.startswith("step-")


@pytest.mark.slow
def test_a_function_of_the_script_can_be_a_reward(whole):
    folder, _ = whole

    @nonet.reward
    def early(item, *, bound: int = 10):
        return item < bound

    changed = api.scenario(folder / "ring.yaml").set(
        "stages.rl.rewards.early", {"use": early, "weight": 0.1, "bound": 12}
    )
    finished = api.run(changed, run_dir=folder / "scripted", panel=Panel(io.StringIO(), live=False))
    assert set(finished.report["rewards"]) == {"hit", "own", "early", "total"}


def _stop_after_a_commit(started) -> None:
    deadline = time.monotonic() + 600
    while not list(started.folder.checkpoints.glob("step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    started.stop()


def _losses(folder: RunFolder) -> dict[tuple[str, int], float]:
    records = map(json.loads, folder.metrics.read_text().splitlines())
    return {
        (r["stage"], r["step"]): r["value"]
        for r in records
        if r["name"] == "loss" and np.isfinite(r["value"])
    }


def _kl_exact(folder: RunFolder) -> list[float]:
    records = map(json.loads, folder.metrics.read_text().splitlines())
    return [r["value"] for r in records if r["name"] == "kl_exact"]


def test_a_run_that_finishes_while_it_is_to_be_resumed_is_not_started_again(ray_local, tmp_path, monkeypatch):
    from nonet.deploy.run.driver import _end_earlier_controller

    run = RunFolder(tmp_path / f"finished-{time.time_ns()}")
    run.path.mkdir()

    @ray_local.remote(num_cpus=0)
    class Controller:
        """Finishes its run when it is asked to stop."""

        def get_folder(self):
            return str(run.path)

        def stop(self):
            run.report.write_text("{}")

        def poll(self, number):
            return {"outcome": {"state": "done"} if run.report.exists() else None}

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    actor = Controller.options(name=f"{run.id}/controller", namespace="nonet", lifetime="detached").remote()
    ray_local.get(actor.get_folder.remote())
    with pytest.raises(ConfigError, match=rf"{run.id} has finished meanwhile: see .*report\.html"):
        _end_earlier_controller(run, resume=True)
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray_local.get_actor(f"{run.id}/controller", "nonet")
