"""Sparse tables as a scenario asks for them, in whole runs on real Ray actors: policies, counts, shards, resume."""

from __future__ import annotations

import io
import json
import threading
import time

import numpy as np
import pytest

import nonet
from nonet.controller.groups.handles import PromptRequest
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.worker_setup import make_run_setup
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.embedding.slices import SLICES
from nonet.embedding.storage.checkpoint import load_table
from nonet.embedding.tables.factory import make_table
from nonet.errors import ConfigError

POLICY = (
    "sparse.tables.user={dim: 8, admit: {count: 2}, evict: {ttl_steps: 5}, default: 0.01}",
    "sparse.tables.item={dim: 8, admit: {probability: 0.3}}",
)
BUDGET = "sparse.tables.item={dim: 8, budget: 1500, evict: {by: lfu}}"  # 23 rows of 64 bytes, of 40 items
WAIT_S = 600
# As many processes as leave the plan's thread count, and so the bits, those of the fused run; two shards leave it one
# thread fewer, and are compared bit for bit in tests/workers/roles/test_sparse_roles.py.
APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
TWO_SHARDS = "roles={rollout: {workers: 1}, embedding: {workers: 2}}"
COMPARED = ("stages", "detail", "paired", "rewards", "users", "rows")
COUNTED = (
    "rows",
    "admitted",
    "refused",
    "evicted",
    "dropped",
)  # what is read depends on who reads, and how often


def run(folder, name, *changes):
    return api.run(api.scenario(folder / "ring.yaml", list(changes)), run_dir=folder / name, panel=quiet())


def quiet():
    return Panel(io.StringIO(), live=False)


def files_of(finished):
    path, _ = Checkpoints(finished.folder.checkpoints).find_newest()
    return read_manifest(path).files


def found_by(finished):
    """Return a run's results, and the counts of its tables in training."""
    report = finished.report
    tables = {name: {what: counts[what] for what in COUNTED} for name, counts in report["sparse"].items()}
    return {key: report[key] for key in COMPARED} | {"tables": tables}


def states_of(finished):
    """Table -> hash of the rows in the newest commit, whatever the shards that wrote them."""
    path, _ = Checkpoints(finished.folder.checkpoints).find_newest()
    found = {}
    for name, spec in (
        make_run_setup(load_scenario(finished.folder.path / "scenario.yaml")[0]).make_table_specs().items()
    ):
        table = make_table(name, spec, 5)
        load_table(table, path, [range(SLICES)])
        found[name] = table.hash_state()
    return found


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    from tests_ring import make_ring

    folder = make_ring(tmp_path_factory.mktemp("policies"))
    return folder, run(folder, "whole", *POLICY)


@pytest.mark.slow
def test_tables_admit_and_evict_as_the_scenario_says_and_the_report_counts_it(whole):
    _, finished = whole
    user, item = finished.report["sparse"]["user"], finished.report["sparse"]["item"]
    assert user["refused"] >= 60  # no user gets a row in the first epoch
    assert user["evicted"] > 0
    assert user["dropped"] >= user["refused"] > 0
    assert user["rows"] == user["admitted"] - user["evicted"] < 60
    assert item["refused"] > 0
    assert item["evicted"] == 0
    assert item["admitted"] == item["rows"] <= 40
    assert user["absent"] > 0  # the rollouts ask for users without a row
    page = (finished.folder.path / "report.html").read_text()
    assert "Sparse tables" in page
    records = (finished.folder.path / "metrics.jsonl").read_text()
    assert '"user.evicted"' in records


@pytest.fixture(scope="module")
def apart(whole):
    """Run the same with rollout and tables in processes of their own."""
    folder, _ = whole
    return run(folder, "apart", *POLICY, APART)


@pytest.mark.slow
def test_policies_give_the_same_bits_with_every_role_in_its_own_process(whole, apart):
    _, finished = whole
    assert found_by(apart) == found_by(finished)
    assert apart.report["absent_reads"] > 0 == finished.report["absent_reads"]
    assert states_of(apart) == states_of(finished)


@pytest.mark.slow
def test_policies_go_on_bit_for_bit_after_a_stop(whole):
    folder, finished = whole
    _compare_resumed(folder, finished, *POLICY)


@pytest.mark.slow
def test_a_budget_holds_and_goes_on_bit_for_bit_after_a_stop(whole):
    folder, _ = whole
    finished = run(folder, "budget", BUDGET)
    item = finished.report["sparse"]["item"]
    assert item["rows"] <= 23 < item["admitted"]
    assert item["evicted"] == item["admitted"] - item["rows"]
    _compare_resumed(folder, finished, BUDGET)


@pytest.mark.slow
def test_a_time_to_live_shorter_than_an_epoch_is_refused_with_the_way_out(whole):
    folder, _ = whole
    with pytest.raises(Exception, match=r"evict.ttl: .* days are \d+ steps .* say evict.ttl_steps"):
        run(folder, "short", "sparse.tables.user={dim: 8, evict: {ttl: 1h}}")


@pytest.mark.slow
def test_replicas_are_sent_everything_once_and_then_what_was_touched(apart):
    sent, tables = apart.report["published"], apart.report["sparse"].values()
    assert sent["full"]["updates"] == 1  # of the untrained model, before the baselines
    assert sent["delta"]["updates"] > 5
    # Rows are frozen in RL: one delta carries what the supervised stages trained and evicted, the others nothing.
    row = 8 + 4 * 8
    held, gone = (sum(table[what] for table in tables) for what in ("rows", "evicted"))
    assert held * row <= sent["delta"]["bytes"] < (held + gone) * 2 * row
    trace = json.loads((apart.folder.path / "trace.json").read_text())
    published = [event["args"] for event in trace if event["name"] == "publish"]
    assert [facts["rows"] for facts in published] == ["full"] + ["delta"] * sent["delta"]["updates"]
    assert [facts["version"] for facts in published] == list(range(1, len(published) + 1))
    assert any(event["args"].get("bytes") for event in trace if event["name"] == "embedding.export")
    assert "rows to rollout" in (apart.folder.path / "report.html").read_text()


@pytest.mark.slow
def test_a_rollout_that_reads_rows_by_key_gives_the_same_bits_as_one_with_copies(whole, apart):
    folder, _ = whole
    by_key = run(folder, "by-key", *POLICY, APART, "sparse.replica_bytes=0")
    assert found_by(by_key) == found_by(apart)
    assert files_of(by_key) == files_of(apart)
    assert by_key.report["published"]["delta"]["updates"] == 0
    trace = json.loads((by_key.folder.path / "trace.json").read_text())
    assert any(event["name"] == "embedding.read" for event in trace)
    told = [event["name"] for event in trace if event["name"] in ("embedding.publish", "embedding.unpublish")]
    assert told[:2] == ["embedding.unpublish"] * 2  # before each supervised stage
    assert set(told[2:]) == {"embedding.publish"}


@pytest.mark.slow
def test_rollouts_serve_the_published_version_while_training_and_moving_rows_go_on(whole):
    """Copies and reads by key answer alike in the midst of training; keys are first asked for there."""
    folder, _ = whole
    with _session(folder, "copies", 1 << 30) as s:
        asked = _trained_and_published(s)
        before = _beams(s, asked)
        assert _same(before, _beams_while_training(s, asked))
        _published_after_a_move(s)
        moved = _beams(s, asked)
        with pytest.raises(ConfigError, match=r"out of the run's 2 .*roles.embedding.workers"):
            s.embedding.reshard(3)
    with _session(folder, "keys", 0) as s:
        asked = _trained_and_published(s)
        assert _same(before, _beams_while_training(s, asked))
        _published_after_a_move(s)
        assert _same(moved, _beams(s, asked))
    assert not np.array_equal(before["logp"], moved["logp"])


def _session(folder, name, replica_bytes):
    changes = [TWO_SHARDS, f"sparse.replica_bytes={replica_bytes}", "stages.pretrain.epochs=40"]
    scenario, beside = load_scenario(folder / "ring.yaml", changes)
    return nonet.Session(scenario, folder=beside, run=RunFolder(folder / name))


def _trained_and_published(s):
    s.begin("pretrain")
    s.trainer.train(s.stage, 0, 6)
    s.publish()
    users, positions = s.rollout.group.draw_held_out_prompts().get(WAIT_S)
    return PromptRequest("rl", 0, 0, users, positions, served=True)


def _beams(s, asked):
    return s.rollout.generate(asked).get(WAIT_S)


def _beams_while_training(s, asked):
    training, serving = s.trainer.group.train(s.stage, 6, s.stage.steps), s.trainer.shards.serve()
    beams = _beams(s, asked)
    assert not training.done()
    training.get(WAIT_S)
    serving.get(WAIT_S)
    return beams


def _published_after_a_move(s):
    spread = s.embedding.count_rows()
    held = s.embedding.reshard([1])
    assert held[0] == {"item": 0, "user": 0}
    assert held[1] == {name: sum(shard[name] for shard in spread) for name in held[1]}
    s.publish()


def _same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in ("item", "logp"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sparse.tables.item={evict: {by: lru}}", "give a budget"),
        ("sparse.tables.item={evict: {ttl: 3d, ttl_steps: 4}}", "one of ttl and ttl_steps"),
        ("sparse.tables.item={admit: {count: 0}}", "admit.count"),
    ],
)
def test_a_policy_that_says_nothing_is_refused_by_the_scenario(tmp_path, change, said):
    from tests_ring import make_ring

    with pytest.raises(ConfigError, match=said):
        api.scenario(make_ring(tmp_path) / "ring.yaml", [change])


def _compare_resumed(folder, finished, *changes):
    name = f"stopped-{finished.folder.path.name}"
    started = api.start(api.scenario(folder / "ring.yaml", list(changes)), run_dir=folder / name)
    stopper = threading.Thread(target=_stop_after_a_commit, args=(started,))
    stopper.start()
    started.wait(quiet())
    stopper.join()
    assert started.state == "stopped"
    resumed = api.resume(folder / name, panel=quiet())
    assert found_by(resumed) == found_by(finished)
    assert files_of(resumed) == files_of(finished)


def _stop_after_a_commit(started) -> None:
    deadline = time.monotonic() + 400
    while not list(started.folder.checkpoints.glob("step-*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    started.stop()
