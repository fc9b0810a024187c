"""`nonet board`: each entry runs once per seed, a finished run is not repeated, and the page has what the runs say."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from ring_world import Ring
from run_folders import folder_of

from nonet.controller.scenario.scenario import load_scenario
from nonet.deploy.after.board import results
from nonet.deploy.run import api
from nonet.errors import WorkerFailed


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def events(ring):
    return ring.corpus().seq.count_events()["test"]


@pytest.fixture
def other(ring):
    """Return a second scenario over the same data."""
    path = ring.scenario.with_name("other.yaml")
    path.write_text(ring.scenario.read_text())
    return path


@pytest.fixture
def started(ring, events, monkeypatch):
    """Instead of running, leave a finished run whose targets all rank at the seed; names and baselines of what began."""
    began: list[tuple[str, dict]] = []

    def run(source, run_dir, command):
        name = f"{run_dir.parent.name} {run_dir.name}"
        if name in stopping:
            return SimpleNamespace(state="stopped", was_interrupted=True)
        baselines = {baseline.title: baseline for baseline in source.scenario.evaluate.baselines}
        began.append((f"{run_dir.parent.name} {run_dir.name}", baselines))
        if began[-1][0] in failing:
            raise WorkerFailed("the trainer died")
        subjects = {"popularity": np.full(events, 15), "sasrec": np.full(events, 9)}
        made = folder_of(ring, run_dir, pretrain=np.full(events, source.scenario.seed), **subjects)
        made.scenario.write_text(json.dumps(source.as_dict()))
        metrics = {"recall@10": 0.5}
        detail = {name: {"test": {"exhaustive": {"all": metrics}}} for name in (*subjects, "pretrain")}
        detail["pretrain"]["test"]["model alone"] = {"all": metrics}
        made.write_json(
            "report.json",
            {
                "baselines": dict.fromkeys(subjects, metrics),
                "stages": {"pretrain": metrics},
                "detail": detail,
                "data": {"users": 40, "items": 40, "events": 400},
                "trained": {
                    "sasrec": {"best": "epoch 3", "options": {"lr": 0.001, "dropout": 0.3, "width": 64}}
                },
                "memory": {"pretrain": {"l": 0.3, "gain": {}}},
                "wall_s": {"total": 100.0},
                "peak_rss_bytes": 1e9,
                "processor": "Abacus 1",
                "versions": {"torch": "2"},
            },
        )
        return SimpleNamespace(state="done", was_interrupted=name in interrupted)

    failing, stopping, interrupted = set[str](), set[str](), set[str]()
    monkeypatch.setattr(api, "run", run)
    return SimpleNamespace(began=began, failing=failing, stopping=stopping, interrupted=interrupted)


def names(started) -> list[str]:
    taken = [name for name, _ in started.began]
    started.began.clear()
    return taken


def test_all_entries_run_with_the_first_seed_before_any_with_the_second_and_none_twice(
    ring, other, started, typed, tmp_path
):
    arguments = ("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    code, out, err = typed(*arguments, "--seeds", "1,3")
    assert code == 0, err
    assert names(started) == ["ring seed-1", "other seed-1", "ring seed-3", "other seed-3"]
    assert "sasrec" in out  # the strongest baseline
    code, out, _ = typed("board", "--run-dir", "b", "--seeds", "2", "--json")
    assert names(started) == ["ring seed-2", "other seed-2"]
    board = json.loads(out)
    assert board == json.loads((tmp_path / "b" / "board.json").read_text())
    assert board["results"]["ring"]["seeds"] == [1, 3, 2]
    assert board["results"]["ring"]["subjects"]["pretrain"]["recall@10"]["mean"] == 1.0
    assert typed("report", tmp_path / "b")[1].startswith(" ")


def test_options_that_the_first_seed_chose_are_those_of_the_others(ring, started, typed):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b", "--seeds", "1,3")
    first, second = (baselines["sasrec"].get_options() for _, baselines in started.began)
    assert first["trials"] == 8
    assert (second["trials"], second["lr"], second["dropout"], second["width"]) == (1, 0.001, 0.3, 64)


def test_a_run_that_fails_does_not_stop_the_others_and_is_tried_again(ring, other, started, typed, tmp_path):
    started.failing.add("ring seed-1")
    arguments = ("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    code, out, err = typed(*arguments, "--seeds", "1,2")
    assert (code, names(started)) == (1, ["ring seed-1", "other seed-1", "other seed-2"])
    assert "ring failed: seed 1: the trainer died" in out
    assert "ring, seed 2: left out, because seed 1 has not finished" in err
    assert "other" in json.loads((tmp_path / "b" / "board.json").read_text())["results"]
    started.failing.clear()
    code, out, _ = typed(*arguments)
    assert (code, names(started)) == (0, ["ring seed-1", "ring seed-2"])
    assert "failed" not in out


def test_a_board_whose_run_is_stopped_starts_no_other(ring, other, started, typed, tmp_path):
    started.stopping.add("ring seed-1")
    code, _, err = typed("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    assert (code, names(started)) == (130, [])
    assert f"Continue with: nonet board --run-dir {tmp_path / 'b'}" in err
    started.stopping.clear()
    assert typed("board", "--run-dir", "b")[0] == 0
    assert names(started) == ["ring seed-1", "other seed-1"]


def test_a_board_that_is_interrupted_while_its_run_ends_starts_no_other(
    ring, other, started, typed, tmp_path
):
    started.interrupted.add("ring seed-1")
    code, out, _ = typed("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    assert (code, names(started)) == (130, ["ring seed-1"])
    assert "ring" in json.loads((tmp_path / "b" / "board.json").read_text())["results"]
    assert "other lacks the seeds 1" in out


def test_a_board_that_is_extended_keeps_what_is_finished_on_its_page(ring, other, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b", "--seeds", "1,2")
    started.stopping.add("other seed-1")
    typed("board", "--data", other, "--run-dir", "b")
    board = json.loads((tmp_path / "b" / "board.json").read_text())
    assert board["results"]["ring"]["seeds"] == [1, 2]
    assert len(board["commands"]) == 2


def test_no_run_starts_that_would_end_after_the_budget(ring, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b")
    names(started)
    code, out, err = typed(
        "board", "--run-dir", "b", "--seeds", "1,2", "--budget", "1min"
    )  # a run takes 100 s
    assert (code, names(started)) == (130, [])
    assert "seed 2: left out, because the budget is spent" in err
    assert "ring lacks the seeds 2; the same command continues" in out
    assert f"nonet board --run-dir {tmp_path / 'b'}" in err
    assert typed("board", "--run-dir", "b", "--seeds", "1,2", "--budget", "1h")[0] == 0


def test_small_sets_are_compared_together_with_their_users_apart(
    ring, other, events, started, typed, tmp_path, monkeypatch
):
    real, users = results.compare_paired, []

    def compare(a, b, user, seed):
        users.append(user)
        return real(a, b, user, seed)

    monkeypatch.setattr(results, "compare_paired", compare)
    typed("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    together = json.loads((tmp_path / "b" / "board.json").read_text())["together"]
    assert (together["sets"], together["events"]) == (["ring", "other"], 2 * events)
    assert set(together["paired"]) == {"popularity", "sasrec"}
    assert together["paired"]["popularity"]["recall@10"] == {"diff": 1.0, "low": 1.0, "high": 1.0}
    assert together["paired"]["sasrec"]["recall@10"]["diff"] == 0.0
    assert not set(users[0][:events]) & set(users[0][events:])
    same_name = {key: {"name": "ring", "events": 1, "stages": ["pretrain"]} for key in ("ring", "ring-time")}
    assert results.compare_small_sets(same_name, tmp_path, ["recall@10"]) == {}


def test_pages_name_the_processor_the_time_and_what_is_missing(ring, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b", "--seeds", "1,3")
    for name in ("board.md", "report.html"):
        text = (tmp_path / "b" / name).read_text()
        for part in (
            "Abacus 1",
            "100 s",
            "1.0 GB",
            "sasrec: epoch 3",
            "The model alone, without its memory",
            "Seeds 1, 3",
        ):
            assert part in text, (name, part)
    text = (tmp_path / "b" / "board.md").read_text()
    assert "± " in text
    assert "Gain from the memory, seed 1 alone" in text
    assert "Repeat seed 1, in the board's folder: nonet run ring.yaml --seeds 1" in text
    repeated = load_scenario(tmp_path / "b" / "ring.yaml", [])[0]
    assert [baseline.use for baseline in repeated.evaluate.baselines] == list(started.began[0][1])


def test_wrong_boards_are_refused_before_anything_runs(ring, started, refused, tmp_path):
    assert "--data is missing" in refused("board", "--run-dir", "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    assert "has no board" in refused("board", "--data", "quickstart", "--run-dir", "full")
    assert "--budget" in refused("board", "--data", "quickstart", "--budget", "soon")
    assert "--seeds must be different" in refused("board", "--data", "quickstart", "--seeds", "1,1")
    assert "board keeps its runs in a folder" in refused(
        "board", "--data", f"ring={_store(ring)}", "--run-dir", "new"
    )
    assert not (tmp_path / "new").exists()
    assert not started.began


def _store(ring):
    path = ring.scenario.with_name("stored.yaml")
    path.write_text(ring.scenario.read_text() + "\nstorage: s3://bucket/runs\n")
    return path
