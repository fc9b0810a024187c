"""`nonet board`: each entry runs once per seed, a finished run is not repeated, and the page has what the runs say."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ring_world import Ring
from run_folders import folder_of

from nonet import trust, yaml
from nonet.controller.record import RunFolder, lock_run
from nonet.controller.scenario.scenario import load_scenario
from nonet.deploy.after.board import board, page, results
from nonet.deploy.run import api
from nonet.errors import WorkerFailed
from nonet.samples.sequences import TEST


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
    code, out, err = typed("board", "--run-dir", "b", "--seeds", "2", "--json")
    assert code == 0, err
    assert names(started) == ["ring seed-2", "other seed-2"]
    made = json.loads(out)
    assert made == json.loads((tmp_path / "b" / "board.json").read_text())
    assert made["results"]["ring"]["seeds"] == [1, 3, 2]
    assert made["results"]["ring"]["subjects"]["pretrain"]["recall@10"]["mean"] == 1.0
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
    assert "ring, seed 1 failed: the trainer died" in out
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


def test_a_board_is_stopped_although_a_result_is_damaged(ring, other, started, typed, tmp_path):
    arguments = ("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b", "--seeds")
    typed(*arguments, "1")
    names(started)
    (tmp_path / "b" / "ring" / "seed-1" / "results" / "pretrain.npz").write_bytes(b"torn")
    started.interrupted.add("ring seed-2")
    assert (typed(*arguments, "1,2")[0], names(started)) == (1, ["ring seed-2"])


def test_a_board_that_is_extended_keeps_what_is_finished_on_its_page(ring, other, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b", "--seeds", "1,2")
    started.stopping.add("other seed-1")
    typed("board", "--data", other, "--run-dir", "b")
    made = json.loads((tmp_path / "b" / "board.json").read_text())
    assert made["results"]["ring"]["seeds"] == [1, 2]
    assert len(made["commands"]) == 2


def test_no_run_starts_that_would_end_after_the_budget(ring, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b")
    names(started)
    code, out, err = typed(
        "board", "--run-dir", "b", "--seeds", "1,2", "--budget", "1min"
    )  # a run takes 100 s
    assert (code, names(started)) == (130, [])
    assert "seed 2: left out, because the budget is spent" in err
    assert "ring lacks the seeds 2; nonet board --run-dir . in the board's folder continues" in out
    assert f"nonet board --run-dir {tmp_path / 'b'}" in err
    assert typed("board", "--run-dir", "b", "--seeds", "1,2", "--budget", "1h")[0] == 0


def test_small_sets_are_compared_together_with_their_users_apart(
    ring, other, events, started, typed, tmp_path, monkeypatch
):
    real, users = results.compare_paired, []

    def compare(a, b, user, seed):
        users.append(user)
        return real(a, b, user, seed)

    def open_pairs(*arguments):
        """Open runs of which two events are of one user each."""
        for run in open_runs(*arguments):
            run.results.user = run.results.user // 2
            yield run

    open_runs = results._open_runs
    monkeypatch.setattr(results, "_open_runs", open_pairs)
    monkeypatch.setattr(results, "compare_paired", compare)
    typed("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b")
    together = json.loads((tmp_path / "b" / "board.json").read_text())["together"]
    assert (together["sets"], together["events"]) == (["ring", "other"], 2 * events)
    assert set(together["paired"]) == {"popularity", "sasrec"}
    assert together["paired"]["popularity"]["recall@10"] == {"diff": 1.0, "low": 1.0, "high": 1.0}
    assert together["paired"]["sasrec"]["recall@10"]["diff"] == 0.0
    user = ring.corpus().seq.find_users(ring.corpus().seq.find_split_events(TEST)) // 2
    assert users[0].tolist() == [*user, *(user + user.max() + 1)]
    same_name = {key: {"name": "ring", "events": 1, "stages": ["pretrain"]} for key in ("ring", "ring-time")}
    assert results.compare_small_sets(same_name, tmp_path, ["recall@10"]) == {}


def test_small_sets_are_compared_by_the_means_of_their_seeds(ring, other, started, typed, tmp_path):
    typed("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b", "--seeds", "1,3")
    made = json.loads((tmp_path / "b" / "board.json").read_text())
    ranks = {"pretrain": np.array([1, 3]), "sasrec": np.array([9])}  # from 0, of the target with each seed
    ndcg = {name: float((1 / np.log2(2 + rank)).mean()) for name, rank in ranks.items()}
    difference = made["together"]["paired"]["sasrec"]["ndcg@10"]["diff"]
    assert difference == pytest.approx(ndcg["pretrain"] - ndcg["sasrec"])


def test_the_reason_of_a_failed_seed_stays_when_the_next_seed_runs(ring, started, typed):
    started.failing.add("ring seed-2")
    code, out, _ = typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b", "--seeds", "1,2,3")
    assert (code, names(started)) == (1, ["ring seed-1", "ring seed-2", "ring seed-3"])
    assert "ring, seed 2 failed: the trainer died" in out


def test_a_damaged_result_fails_its_set_alone(ring, other, started, typed, tmp_path):
    arguments = ("board", "--data", f"ring={ring.scenario},{other}", "--run-dir", "b", "--seeds")
    typed(*arguments, "1")
    names(started)
    (tmp_path / "b" / "ring" / "seed-1" / "results" / "pretrain.npz").write_bytes(b"torn")
    code, out, _ = typed(*arguments, "1,2")
    assert (code, names(started)) == (1, ["ring seed-2", "other seed-2"])
    assert "ring, seed 2 failed: " in out
    assert "pretrain.npz" in out
    assert json.loads((tmp_path / "b" / "board.json").read_text())["results"]["other"]["seeds"] == [1, 2]


def test_seeds_of_a_changed_scenario_are_not_averaged(ring, other, started, typed, tmp_path):
    arguments = ("board", "--data", str(other), "--run-dir", "b", "--seeds")
    typed(*arguments, "1")
    other.write_text(other.read_text().replace("history: 8", "history: 7"))
    code, out, _ = typed(*arguments, "1,2")
    assert code == 1
    assert "seed-2 differs from " in out
    assert "in more than the seed: data.history. Their results cannot be averaged" in out
    assert json.loads((tmp_path / "b" / "board.json").read_text())["results"]["other"]["seeds"] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [{"name": "../../outside", "protocol": "own", "source": "x", "baselines": []}]},
        {"entries": [{"name": "a", "protocol": "lsat", "source": "x", "baselines": []}]},
        {"entries": [{"name": "a", "protocol": "last", "source": "x", "baselines": [], "x": 1}]},
        {"seeds": ["1"]},
        {"results": [1]},
        [1],
        {"a": 1},
    ],
    ids=str,
)
def test_a_board_that_no_board_has_written_is_refused(ring, typed, refused, started, tmp_path, change):
    typed("board", "--data", ring.scenario, "--run-dir", "b")
    names(started)
    (tmp_path / "b" / "board.json").write_text(json.dumps(change))
    assert "board.json is damaged" in refused("board", "--run-dir", "b")
    assert "board.json is damaged" in refused("report", tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"b"}
    assert not started.began


def test_a_board_of_somebody_else_imports_no_code_before_it_is_approved(
    typed, refused, started, tmp_path, write_log
):
    write_log(tmp_path / "films.csv")
    started.failing.add("films-last seed-1")
    typed("board", "--data", "films.csv", "--run-dir", "b")
    (tmp_path / "b" / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    scenario = tmp_path / "b" / "films-last.yaml"
    document = yaml.parse(scenario.read_text())
    document["evaluate"]["baselines"] = [{"use": "evil.py:Mine"}]
    scenario.write_text(yaml.dump(document))
    assert "names code that you have not put into this board" in refused("board", "--run-dir", "b")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "change", [{"source": "evil.yaml"}, {"baselines": [{"use": "evil.py:Mine"}]}], ids=str
)
def test_a_board_whose_entries_others_have_changed_is_refused(
    ring, typed, refused, started, tmp_path, change
):
    typed("board", "--data", ring.scenario, "--run-dir", "b")
    evil = Path(ring.scenario).with_name("evil.py")
    evil.write_text("raise SystemExit('it ran')")
    text = f"extends: {ring.scenario}\ntracking: {{x: {{use: {evil}:T}}}}\n"
    (tmp_path / "evil.yaml").write_text(text)
    content = json.loads((tmp_path / "b" / "board.json").read_text())
    content["entries"][0] |= change
    (tmp_path / "b" / "board.json").write_text(json.dumps(content))
    message = refused("board", "--run-dir", "b", "--seeds", "1,2")
    assert "names code that you have not put into this board" in message
    assert "add --trust" in message


def test_code_that_changed_since_a_board_began_runs_in_none_of_its_later_seeds(
    typed, refused, started, tmp_path, write_log
):
    """The code's file, what the scenario extends, and the results of the first seed, which name options of baselines."""
    write_log(tmp_path / "films.csv")
    typed("board", "--data", "films.csv", "--run-dir", "b")
    folder, ran = tmp_path / "b", f"open({str(tmp_path / 'pwned')!r}, 'w')"
    scenario = folder / "films-last.yaml"
    document = yaml.parse(scenario.read_text())
    (folder / "evil.py").write_text("")
    (folder / "base.yaml").write_text(f"extends: {document['extends']}\n")
    scenario.write_text(yaml.dump(document | {"extends": "base.yaml"}))
    again = ("board", "--run-dir", "b", "--seeds", "1,2")
    entry = board.BoardEntry(**board.read_board(folder)["entries"][0])
    board.approve_content(board._describe_code(entry, {"seeds": [1]}, folder))
    (folder / "base.yaml").write_text(
        f"extends: {document['extends']}\ntracking: {{x: {{use: evil.py:T}}}}\n"
    )
    assert "names code" in refused(*again)
    board.approve_content(board._describe_code(entry, {"seeds": [1]}, folder))
    (folder / "evil.py").write_text(ran)
    assert "names code" in refused(*again)
    (folder / "evil.py").write_text("")
    (folder / "base.yaml").write_text(
        f"extends: {document['extends']}\ntracking: {{x: {{use: evil.py:T}}, y: {{use: 'other:T'}}}}\n"
    )
    (folder / "other.py").write_text("")
    board.approve_content(board._describe_code(entry, {"seeds": [1]}, folder))
    (folder / "other.py").write_text(ran)
    assert "names code" in refused(*again)
    (folder / "other.py").write_text("")
    report = folder / "films-last" / "seed-1" / "report.json"
    content = json.loads(report.read_text())
    content["trained"]["sasrec"]["options"] |= {"use": "evil.py:T", "lr": "evil.py:Other"}
    report.write_text(json.dumps(content))
    assert "names code" in refused(*again)
    assert not (tmp_path / "pwned").exists()


def test_a_planted_result_names_no_code_of_a_baseline(typed, started, tmp_path, write_log):
    write_log(tmp_path / "films.csv")
    typed("board", "--data", "films.csv", "--run-dir", "b")
    report = tmp_path / "b" / "films-last" / "seed-1" / "report.json"
    content = json.loads(report.read_text())
    content["trained"]["sasrec"]["options"]["use"] = "ials"
    report.write_text(json.dumps(content))
    entry = board.BoardEntry(**board.read_board(tmp_path / "b")["entries"][0])
    (change,) = board._list_baseline_changes(entry, [1], tmp_path / "b")
    uses = [options["use"] for options in json.loads(change.partition("=")[2])]
    assert uses == [options["use"] for options in entry.baselines]


def test_a_link_in_a_board_is_refused_before_anything_is_written(
    typed, refused, started, tmp_path, write_log
):
    write_log(tmp_path / "films.csv")
    (tmp_path / "victim").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "board.json").write_text("{}")
    (tmp_path / "b" / "films-data").symlink_to(tmp_path / "victim")
    assert "is a link" in refused("board", "--data", "films.csv", "--run-dir", "b")
    (tmp_path / "b" / "films-data").unlink()
    (tmp_path / "b" / "films-last").mkdir()
    (tmp_path / "b" / "films-last" / "seed-1").symlink_to(tmp_path / "victim")
    assert "is a link" in refused("board", "--data", "films.csv", "--run-dir", "b")
    (tmp_path / "b" / "films-last" / "seed-1").unlink()
    (tmp_path / "b" / "films-last" / "seed-1").mkdir()
    (tmp_path / "b" / "films-last" / "seed-1" / "artifacts").symlink_to(tmp_path / "victim")
    assert "is a link" in refused("board", "--data", "films.csv", "--run-dir", "b")
    assert not [*(tmp_path / "victim").iterdir()]


def test_a_board_that_was_moved_continues_with_trust(ring, typed, refused, started, tmp_path, monkeypatch):
    typed("board", "--data", f"ring={ring.scenario}", "--run-dir", "b")
    names(started)
    (tmp_path / "b").rename(tmp_path / "moved")
    assert "add --trust" in refused("board", "--run-dir", "moved", "--seeds", "1,2")
    monkeypatch.setattr(trust, "_settings", {**trust._settings})
    assert typed("board", "--run-dir", "moved", "--seeds", "1,2", "--trust")[0] == 0
    assert names(started) == ["ring seed-2"]


def test_a_board_that_was_killed_while_it_imported_continues(
    started, typed, tmp_path, write_log, monkeypatch
):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    log = write_log(tmp_path / "films.csv")
    with monkeypatch.context() as patched:
        patched.setattr(board, "_remove_unless_begun", lambda *_: nullcontext())  # as after a SIGKILL
        patched.setattr(board, "check_comparable", die)
        with pytest.raises(Killed):
            typed("board", "--data", log, "--run-dir", "b")
    assert (tmp_path / "b" / "films-data").is_dir()
    assert typed("board", "--data", log, "--run-dir", "b")[0] == 0
    assert names(started) == ["films-last seed-1"]


def test_a_second_board_in_the_same_folder_is_refused(ring, started, refused, tmp_path):
    (tmp_path / "b").mkdir()
    with lock_run(RunFolder(tmp_path / "b")):
        assert "another process" in refused("board", "--data", ring.scenario, "--run-dir", "b")


def test_the_users_own_folder_stays_where_a_board_is_refused(started, refused, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "link"):
        assert "--data is missing" in refused("board", "--run-dir", name)
        assert "nowhere" in refused("board", "--run-dir", name, "--data", "nowhere")
    assert not [path for path in (tmp_path / "mine").iterdir() if not path.name.startswith(".")]
    (tmp_path / "mine" / "board.json").write_text("{}")  # of a board that was killed before its first entry
    (tmp_path / "mine" / "thesis.txt").write_text("")
    (tmp_path / "mine" / "link").symlink_to(tmp_path)
    assert "is a link" in refused("board", "--run-dir", "mine", "--data", "nowhere")
    (tmp_path / "mine" / "link").unlink()
    assert "nowhere" in refused("board", "--run-dir", "mine", "--data", "nowhere")
    (tmp_path / "mine" / "link").symlink_to(tmp_path)
    assert {"board.json", "thesis.txt", "link"} <= {path.name for path in (tmp_path / "mine").iterdir()}


def test_a_control_of_rl_is_not_the_strongest_baseline():
    scores = {metric: {"mean": 0.1} for metric in ("recall@10", "ndcg@10")}
    better = {metric: {"mean": 0.9} for metric in scores}
    entry = {
        "subjects": {"popularity": scores, "rl": better, "rl_control": better, "rl_rerank": better},
        "stages": ["rl"],
    }
    assert page._find_strongest(entry | {"paired": {}}) == "popularity"


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
    for seeds in ("1,1", "99999999999999999999999"):
        assert "--seeds must be different" in refused("board", "--data", "quickstart", "--seeds", seeds)
    assert "defined for single events" in refused("board", "--data", "ctr", "--run-dir", "new")
    assert "board keeps its runs in a folder" in refused(
        "board", "--data", f"ring={_store(ring)}", "--run-dir", "new"
    )
    assert not (tmp_path / "new").exists()
    assert not started.began


def _store(ring):
    path = ring.scenario.with_name("stored.yaml")
    path.write_text(ring.scenario.read_text() + "\nstorage: s3://bucket/runs\n")
    return path
