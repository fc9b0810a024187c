"""The artifacts of a stored run that a worker on another node has made: facts about them count once the run has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nonet.controller.record.checkpoint_log import CheckpointLog
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.session import artifacts
from nonet.controller.session.bound_run import BoundRun
from nonet.errors import WorkerLost
from nonet.storage import MountedRun, RunCopy, RunWriter, mounts
from tests.storage.memory_storage import MemoryStorage

FILES = ("data.npy", "more.npy")  # of each artifact


class World:
    """A stored run whose tokeniser answers at once; `told` are the artifacts that its node says it has stored."""

    def __init__(self, folder, monkeypatch):
        copy = RunCopy(MountedRun("s3://x/run-1", str(folder / "run-1")), MemoryStorage())
        monkeypatch.setitem(mounts._copies, copy.path, copy)
        self.run, self.writer, self.made, self.dead = RunFolder(copy.path), RunWriter(copy), 0, list[str]()
        other = RunCopy(MountedRun("s3://x/run-1", str(folder / "other" / "run-1"), 1, 9), copy.storage)
        kinds = ("sequences", "sids")
        for kind in kinds:
            (other.path / "artifacts" / kind).mkdir(parents=True)
            for name in FILES:
                (other.path / "artifacts" / kind / name).write_text(kind)
        other.put(other.path / "artifacts")
        self.told = other.list_put(0)
        places = {
            kind: {
                "path": str(self.run.path / "artifacts" / kind),
                "sha256": "0" * 64,
                "files": list(FILES),
            }
            for kind in kinds
        }
        self.facts = {"artifacts": places, "data": {"duplicates": 0}}
        monkeypatch.setattr(artifacts, "make_data_setup", lambda *_: None)
        self.folder = folder

    def _prepare(self, *_):
        self.made += 1
        self.writer.collect_from(lambda: self.told)
        return SimpleNamespace(done=lambda: True, get=lambda deadline: self.facts)

    def tokenise(self) -> None:
        scenario = load_scenario("quickstart", [])[0]
        hosts = SimpleNamespace(wait_until_ready=lambda: None, read_file=lambda path: None)
        group = SimpleNamespace(prepare=self._prepare, hosts=hosts)
        binding = SimpleNamespace(list_dead_workers=lambda: self.dead)
        processes = SimpleNamespace(
            run=self.run,
            scenario=scenario,
            deadlines=scenario.deadlines,
            group=lambda role: group,
            binding=binding,
        )
        log = CheckpointLog(self.run, "", 3, self.writer)
        bound_run = BoundRun(processes, log, None, self.writer, None, print, print)  # type: ignore[arg-type]
        artifacts.open_artifacts(bound_run, self.folder)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    made.writer.close(commit=False)


def test_artifacts_that_are_on_other_nodes_are_not_made_again(world):
    world.tokenise()
    world.tokenise()
    assert world.made == 1


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_artifacts_that_died_with_their_worker_leave_no_facts(world, kept):
    told, world.told, world.dead = world.told, world.told[:kept], ["tokenise-0"]
    with pytest.raises(WorkerLost, match=r"artifacts/[\w/.]+ was lost with tokenise-0"):
        world.tokenise()
    assert world.run.read_facts() is None
    world.told, world.dead = told, []
    world.tokenise()
    assert world.made == 2


@pytest.mark.parametrize("kept", [0, 1])
def test_facts_of_artifacts_that_an_outage_and_a_kill_have_lost_are_not_believed(world, kept):
    world.run.write_facts(world.facts)  # it was written here, and what the worker stored was never told
    for kind in list(world.facts["artifacts"])[:kept]:
        (world.run.path / "artifacts" / kind).mkdir(parents=True)
        (world.run.path / "artifacts" / kind / FILES[0]).write_text(kind)
    world.tokenise()
    assert world.made == 1


def test_artifacts_whose_files_an_earlier_version_did_not_list_count_with_their_folders(world):
    for kind, artifact in world.facts["artifacts"].items():
        del artifact["files"]
        (world.run.path / "artifacts" / kind).mkdir(parents=True)
    world.run.write_facts(world.facts)
    world.tokenise()
    assert world.made == 0


def test_an_answer_from_before_a_file_was_made_is_not_the_last_word(world):
    told, answers = world.told, [[], world.told]
    world.told = []
    world.facts["artifacts"].pop("sids")

    def tell():
        return answers.pop(0) if answers else []

    real_prepare = world._prepare

    def prepare(*arguments):
        future = real_prepare(*arguments)
        world.writer.collect_from(tell)
        return future

    world._prepare = prepare
    world.tokenise()
    assert not answers
    assert told
    assert world.run.read_facts() is not None
