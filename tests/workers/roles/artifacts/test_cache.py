"""Runs on the same data share their artifacts: each is made once, and nothing that is damaged or of other data is taken."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ring_world import Ring
from tests_ring import make_ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.storage import node_cache
from nonet.workers.roles.artifacts import DataSetup, cache, tokenizer
from nonet.workers.roles.artifacts.cache import NUMBERS, ArtifactCache, MadeArtifacts
from nonet.workers.roles.artifacts.folders import PREPARING, store_artifact
from nonet.workers.roles.artifacts.tokenizer import Tokeniser

ALL = {"sequences", "sids", "transitions"}


class Runs:
    """Runs of the ring with one cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cache = folder / "cache"
        (folder / "data").mkdir()
        self.scenario = make_ring(folder / "data") / "ring.yaml"
        self._runs = 0

    def run(self, *changes: str, known=None) -> dict:
        """Tokenise a run, and return its facts."""
        self._runs += 1
        loaded, beside = load_scenario(self.scenario, [f"data.cache={self.cache}", *changes])
        setup = make_data_setup(loaded, beside, known)
        return Tokeniser().prepare(setup, str(self.folder / f"run-{self._runs}"))

    def take(self, *changes: str, known=None) -> set[str]:
        """Return what a run takes from the cache, which has no problem."""
        found = self.run(*changes, known=known).get("cache", {"taken": {}, "problems": []})
        assert not found["problems"]
        return set(found["taken"])

    def entries(self) -> list[Path]:
        """Return the folders of the entries."""
        return [path.parent for path in sorted((self.cache / "artifacts").glob("*/entry.json"))]


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_a_second_run_takes_the_files_of_the_first_and_has_the_same_facts(runs, how, monkeypatch):
    changes = [f"data.prepare={how}", "data.events={compress: 1d}"]
    first = runs.run(*changes)
    assert "cache" not in first
    for name in ("build_with_facts", "prepare_on_disk", "write_memory"):
        monkeypatch.setattr(DataSetup, name, lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(tokenizer, "_make_ids", lambda *_: pytest.fail("made again"))
    second = runs.run(*changes)
    assert second.pop("cache") == {"taken": dict.fromkeys(ALL, "run-1"), "problems": []}
    text = json.dumps(first, sort_keys=True).replace("/run-1/", "/run-2/")
    assert json.dumps(second, sort_keys=True) == text
    files = [
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in (runs.folder / "run-1", runs.folder / "run-2")
    ]
    assert files[0] - {Path("artifacts/prepared.json")} == files[1]
    for file in files[1]:
        assert (runs.folder / "run-1" / file).read_bytes() == (runs.folder / "run-2" / file).read_bytes()


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ("seed=6", {"sequences", "transitions"}),
        ("model.memory={decay: validation}", {"sequences", "sids"}),
        ("tokenizer.codes=5", {"sequences", "transitions"}),
        ("model.memory={reach: 2}", {"sequences", "sids"}),
        ("model.width=16", ALL),
        ("data.history=3", ALL),
        ("data.where='rating >= 2'", set()),
        ("data.keep={item_events: 23}", set()),
        ("data.split={use: leave_last_out, test: 2, valid: 1}", set()),
        ("data.prepare=disk", set()),
        ("data.repeats=allow", set()),
        ("data.missing=[x]", set()),
        ("stages.finetune.target='rating >= 3'", set()),
        ("data.events={compress: 1d}", set()),
    ],
)
def test_what_a_change_reaches_is_made_again_and_nothing_else(runs, change, taken):
    runs.run()
    assert runs.take(change) == taken
    assert runs.take(change) == ALL


def test_other_rows_and_other_vectors_are_other_data(runs):
    data = runs.scenario.parent
    runs.run()
    table = pq.read_table(data / "interactions.parquet")
    pq.write_table(table.slice(0, len(table) - 1), data / "interactions.parquet")
    assert runs.take() == set()
    assert runs.take() == ALL
    items = pq.read_table(data / "items.parquet")
    for weight in (1.0, 2.0):
        vectors = pa.array([[weight * row, 1.0] for row in range(len(items))], pa.list_(pa.float32()))
        pq.write_table(pa.table({"item_id": items["item_id"], "v": vectors}), data / "own.parquet")
        assert runs.take("tokenizer.vectors=[own.parquet]") == {"sequences", "transitions"}
    assert runs.take("data.vectors={image: own.parquet}") == set()


def test_the_order_of_columns_and_stages_is_a_part_of_the_data(runs):
    items = pq.read_table(runs.scenario.parent / "items.parquet")
    vectors = pa.array([[1.0 * row, 1.0] for row in range(len(items))], pa.list_(pa.float32()))
    pq.write_table(
        pa.table({"item_id": items["item_id"], "v": vectors}), runs.scenario.parent / "own.parquet"
    )
    runs.run("data.vectors={x: own.parquet, y: own.parquet}")
    assert runs.take("data.vectors={y: own.parquet, x: own.parquet}") == set()


def test_what_labels_follow_from_is_a_part_of_the_data(runs):
    data = runs.scenario.parent
    events = pq.read_table(data / "interactions.parquet").select(["user_id", "item_id", "timestamp"])
    pq.write_table(events.slice(0, 40), data / "labels.parquet")
    label = "data.labels={path: labels.parquet, within: %s, name: bought}"
    runs.run(label % "1h")
    assert runs.take(label % "1h") == ALL
    assert runs.take(label % "2h") == set()
    pq.write_table(events.slice(0, 80), data / "labels.parquet")
    assert runs.take(label % "1h") == set()


def test_a_store_that_does_not_tell_equal_content_shares_nothing(runs, monkeypatch):
    monkeypatch.setattr("nonet.samples.tables.files.identify_file", lambda *_: "time:5:7")
    for _ in range(2):
        assert runs.take() == set()
    monkeypatch.setattr("nonet.samples.tables.files.identify_file", lambda *_: "etag:5")
    runs.run()
    assert runs.take() == ALL
    shutil.copytree(runs.scenario.parent, runs.folder / "moved")
    runs.scenario = runs.folder / "moved" / "ring.yaml"
    assert runs.take() == set()  # an ETag tells content at one address


def test_a_folder_above_other_folders_is_no_column(runs):
    data = runs.scenario.parent
    for folder in ("day=7", "day=7/more"):
        (data / folder).mkdir(exist_ok=True)
        shutil.copy(data / "interactions.parquet", data / folder / "e.parquet")
        assert runs.take(f"data.interactions={folder}/e.parquet") == set()


def test_a_user_without_a_home_has_no_cache(runs, monkeypatch):
    monkeypatch.delenv("NONET_CACHE")
    monkeypatch.setattr(Path, "home", Path("~nobody9").expanduser)
    (problem,) = runs.run("data.cache=node")["cache"]["problems"]
    assert "set NONET_CACHE" in problem


def test_trouble_of_the_run_deletes_no_entry(runs, monkeypatch):
    runs.run()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_link_files", lambda *_: (_ for _ in ()).throw(OSError(28, "the disk is full")))
        (problem,) = runs.run()["cache"]["problems"]
    assert "the disk is full" in problem
    assert runs.take() == ALL


def test_a_cache_on_another_disk_is_copied_from(runs, monkeypatch):
    monkeypatch.setattr(cache.os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "another disk")))
    runs.run()
    assert runs.take() == ALL


def test_what_an_earlier_attempt_has_left_is_neither_shared_nor_kept(runs):
    root = runs.folder / "run-1" / "artifacts"
    (root / "repeats-01234567").mkdir(parents=True)
    (root / "preparing-01234567").mkdir()
    (root / "labels.json").write_text("{}")
    runs.run("data.events={compress: 1d}", "data.prepare=disk")
    assert not (root / "preparing-01234567").exists()
    (runs.folder / "run-2" / "artifacts" / "preparing-01234567").mkdir(parents=True)
    runs.run("data.events={compress: 1d}", "data.prepare=disk")
    names = {path.name for path in (runs.folder / "run-2" / "artifacts").iterdir()}
    assert "repeats-01234567" not in names
    assert not names & {"labels.json", "preparing-01234567"}


def test_the_same_rows_in_another_place_are_the_same_data(runs):
    runs.run()
    shutil.copytree(runs.scenario.parent, runs.folder / "moved")
    runs.scenario = runs.folder / "moved" / "ring.yaml"
    assert runs.take() == ALL


def test_a_folder_that_is_a_column_is_a_part_of_the_data(runs):
    data = runs.scenario.parent
    for day in (1, 2):
        shutil.rmtree(data / "days", ignore_errors=True)
        (data / "days" / f"day={day}").mkdir(parents=True)
        shutil.copy(data / "interactions.parquet", data / "days" / f"day={day}" / "interactions.parquet")
        assert runs.take("data.interactions=days") == set()


def test_ids_of_a_run_that_starts_from_another_one_are_not_shared(runs):
    runs.run()
    (runs.folder / "ring").mkdir()
    known = Ring(runs.folder / "ring").known()
    assert runs.take(known=known) == {"sequences", "transitions"}


def test_none_is_no_cache(runs):
    for _ in range(2):
        assert "cache" not in runs.run("data.cache=none")
    assert not runs.cache.exists()


def replace_by_link(file: Path) -> None:
    """Move a file, and link to it."""
    file.rename(file.parents[3] / "elsewhere")
    file.symlink_to(file.parents[3] / "elsewhere")


def change_entry(folder: Path, **fields: object) -> None:
    """Change fields of entry.json, as somebody does who knows its digest."""
    entry = {**json.loads((folder / "entry.json").read_text()), **fields}
    del entry["digest"]
    (folder / "entry.json").write_text(json.dumps({**entry, "digest": cache._compute_digest(entry)}))


def change_artifacts(folder: Path, **fields: object) -> None:
    """Change fields of the artifacts in entry.json."""
    artifacts = json.loads((folder / "entry.json").read_text())["artifacts"]
    change_entry(folder, artifacts=[{**artifact, **fields} for artifact in artifacts])


def replace_folder_by_link(folder: Path) -> None:
    """Move a folder, and link to it."""
    shutil.move(folder, f"{folder}-elsewhere")
    folder.symlink_to(f"{folder}-elsewhere")


def replace_by_pipe(file: Path) -> None:
    """Replace a file by a pipe, whose reader waits."""
    file.unlink()
    os.mkfifo(file)


def lead_out(folder: Path) -> None:
    """Let an entry name a file that is outside of its files, and would be outside of the artifacts of a run."""
    (folder / "outside").write_text("x")
    files = json.loads((folder / "entry.json").read_text())["files"]
    content = hashlib.sha256(b"x").hexdigest()
    change_entry(folder, others=["../outside"], files={**files, "../outside": content})


def find_file(folder: Path) -> Path:
    """Return the first file of the content of an entry, which no run shares."""
    file = min(path for path in (folder / "files").rglob("*") if path.is_file())
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    return file


DAMAGES = {
    "a byte": lambda folder: find_file(folder).write_bytes(b"x" * find_file(folder).stat().st_size),
    "half a file": lambda folder: os.truncate(find_file(folder), 3),
    "no file": lambda folder: find_file(folder).unlink(),
    "one more file": lambda folder: (find_file(folder).parent / "more").write_text(""),
    "a link": lambda folder: replace_by_link(find_file(folder)),
    "no text": lambda folder: (folder / "entry.json").write_text(""),
    "a list": lambda folder: (folder / "entry.json").write_text("[]"),
    "deep": lambda folder: (folder / "entry.json").write_text("[" * 10**5),
    "no entry": lambda folder: (folder / "entry.json").unlink(),
    "a name outside": lambda folder: lead_out(folder),
    "a number as names": lambda folder: change_entry(folder, others=3),
    "another kind": lambda folder: change_entry(folder, kind="other"),
    "no facts": lambda folder: change_entry(folder, facts=None),
    "no artifacts": lambda folder: change_entry(folder, artifacts=[]),
    "an artifact of no kind": lambda folder: change_artifacts(folder, kind=None),
    "an artifact of another kind": lambda folder: change_artifacts(folder, kind="graphs"),
    "the file of the progress": lambda folder: change_entry(folder, others=["preparing.json"]),
    "a digit of entry.json": lambda folder: (folder / "entry.json").write_text(
        (folder / "entry.json").read_text().replace("run-1", "run-2")
    ),
    "a pipe": lambda folder: replace_by_pipe(folder / "entry.json"),
    "a linked entry.json": lambda folder: replace_folder_by_link(folder / "entry.json"),
    "linked files": lambda folder: replace_folder_by_link(folder / "files"),
    "a linked entry": replace_folder_by_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_and_made_again(runs, damage):
    expected = runs.run()["artifacts"]
    for folder in runs.entries():
        DAMAGES[damage](folder)
    facts = runs.run()
    problems = facts["cache"]["problems"]
    assert len(problems) == 3
    assert not facts["cache"]["taken"]
    assert all("is damaged" in problem and "made again" in problem for problem in problems)
    assert {kind: each["sha256"] for kind, each in facts["artifacts"].items()} == {
        kind: each["sha256"] for kind, each in expected.items()
    }
    assert runs.take() == ALL


def test_a_cache_that_cannot_be_written_costs_time_only(runs):
    runs.cache.write_text("a file")
    facts = runs.run()
    assert set(facts["artifacts"]) == {*ALL, "catalogue"}
    (problem,) = facts["cache"]["problems"]
    assert "is not used" in problem


def test_artifacts_that_are_larger_than_the_cache_are_not_kept(runs, monkeypatch):
    monkeypatch.setenv("NONET_CACHE_BYTES", "1KB")
    problems = runs.run()["cache"]["problems"]
    assert all("raise NONET_CACHE_BYTES" in problem for problem in problems)
    assert not runs.entries()


def test_a_run_stays_complete_without_the_cache(runs):
    runs.run()
    facts = runs.run()
    shutil.rmtree(runs.cache)
    folders = [Path(artifact["path"]) for artifact in facts["artifacts"].values()]
    assert all(any(folder.iterdir()) for folder in folders)
    shutil.move(runs.folder / "run-2", runs.folder / "moved")
    assert (runs.folder / "moved" / "artifacts" / folders[0].name).is_dir()


def write_one(root: Path) -> MadeArtifacts:
    """Make artifacts of one file."""
    made = (
        store_artifact(root, kind, lambda folder: (folder / "file").write_text("content"))
        for kind in ("sids", "catalogue")
    )
    return MadeArtifacts(tuple(made), {"fact": 1})


def wait_for(condition) -> None:
    """Wait until a condition holds, for at most a minute."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_of_two_runs_makes_an_artifact_and_the_other_waits_and_shows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "_POLL_S", 0.01)
    made, may_end = [], threading.Event()

    def make(name: str) -> MadeArtifacts:
        made.append(name)
        assert may_end.wait(60)
        return write_one(tmp_path / name / "artifacts")

    found = {}

    def start(name: str) -> threading.Thread:
        root = tmp_path / name / "artifacts"
        root.mkdir(parents=True)
        shared = ArtifactCache(tmp_path / "cache", root)
        thread = threading.Thread(
            target=lambda: found.update(
                {name: (shared.get_or_make("sids", lambda: {"a": 1}, lambda: make(name)), shared.taken)}
            )
        )
        thread.start()
        return thread

    one = start("one")
    wait_for(lambda: bool(made))
    two = start("two")
    progress = tmp_path / "two" / "artifacts" / PREPARING
    wait_for(progress.is_file)
    assert "another run prepares the same data" in json.loads(progress.read_text())["text"]
    may_end.set()
    one.join(60)
    two.join(60)
    assert made == ["one"]
    assert not progress.exists()
    assert found["one"][1] == {}
    assert found["two"][1] == {"sids": "one"}
    assert found["two"][0].facts == {"fact": 1}
    assert sorted(path.name.partition("-")[0] for path in progress.parent.iterdir()) == ["catalogue", "sids"]


@pytest.mark.timeout(60)
def test_a_maker_that_is_suspended_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "_MAKER_PATIENCE_S", 0.05)
    monkeypatch.setattr(node_cache, "_POLL_S", 0.01)
    root = tmp_path / "run" / "artifacts"
    root.mkdir(parents=True)
    shared = ArtifactCache(tmp_path / "cache", root)
    key = cache.make_key("sids", {"a": 1})
    lock = tmp_path / "cache" / "artifacts" / f"{key}.make"
    lock.parent.mkdir(parents=True)
    with node_cache.FILE_LOCKS.hold(lock):
        made = shared.get_or_make("sids", lambda: {"a": 1}, lambda: write_one(root))
    assert Path(made.artifacts[0]["path"]).is_dir()


def test_data_that_change_while_they_are_prepared_are_not_kept(tmp_path):
    root = tmp_path / "run" / "artifacts"
    root.mkdir(parents=True)
    contents = [1, 2, 1]
    for _ in range(2):
        shared = ArtifactCache(tmp_path / "cache", root)
        shared.get_or_make("sids", lambda: {"a": contents.pop(0)}, lambda: write_one(root))
        assert not shared.taken
        if contents:
            assert "sids" not in shared.keys
            contents.append(1)


def test_other_libraries_and_numbers_are_other_keys(monkeypatch):
    before = cache.make_key("sids", {})
    monkeypatch.setitem(NUMBERS, "sids", NUMBERS["sids"] + 1)
    raised = cache.make_key("sids", {})
    monkeypatch.setattr(cache, "_list_versions", lambda: {"numpy": "0"})
    assert len({before, raised, cache.make_key("sids", {})}) == 3


def hash_contents(folder: Path) -> str:
    """Return a hash of the names, arrays, tables and texts of a folder, however a library encodes them in files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        if file.suffix == ".parquet":
            table = pq.read_table(file)
            digest.update(repr([(field.name, str(field.type)) for field in table.schema]).encode())
            digest.update(repr(table.to_pylist()).encode())
        elif file.suffix in (".npy", ".npz"):
            loaded = np.load(file)
            for name in getattr(loaded, "files", [""]):
                array = loaded[name] if name else loaded
                digest.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


STORED = Path(__file__).with_name("contents.json")
CASES = {
    "memory": [],
    "disk": ["data.prepare=disk"],
    "labels": ["data.labels={path: labels.parquet, within: 1h, name: bought}"],
    "compressed": ["data.events={compress: 1d}", "data.prepare=disk"],
    "filtered": ["data.where='rating >= 2'", "data.keep={item_events: 20}", "data.repeats=allow"],
    "votes": ["model.memory={voters: [transitions, cooccurrence], signals: [categories]}"],
}


@pytest.mark.parametrize("case", CASES)
def test_artifacts_of_other_content_have_another_number(runs, case):
    """If it fails, raise the number of each kind that it names in `NUMBERS`, and store what it prints in contents.json."""
    data = runs.scenario.parent
    events = pq.read_table(data / "interactions.parquet").slice(0, 40)
    pq.write_table(events.select(["user_id", "item_id", "timestamp"]), data / "labels.parquet")
    artifacts = runs.run("data.cache=none", *CASES[case])["artifacts"]
    found = {kind: hash_contents(Path(artifact["path"])) for kind, artifact in artifacts.items()}
    found["numbers"] = NUMBERS
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {}
    if os.environ.get("NONET_STORE_CONTENTS"):
        STORED.write_text(json.dumps({**stored, case: found}, indent=1, sort_keys=True) + "\n")
    assert found == stored[case], json.dumps({case: found})
