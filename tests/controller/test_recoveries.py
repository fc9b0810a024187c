"""How a controller goes on after a loss, without Ray: what `test_lives.py` does with SIGKILL, in milliseconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import replace_globals

from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.journal import Journal, read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.single_controller import MOST_RECOVERIES, ControllerTask, SingleController
from nonet.errors import NonetError, StorageError, WorkerLost
from nonet.storage import MountedRun, RunCopy, RunWriter
from tests.storage.memory_storage import MemoryStorage

Conductor = SingleController.__ray_metadata__.modified_class  # type: ignore[attr-defined]


_SCENARIO: Any = SimpleNamespace(deadlines=SimpleNamespace(replace=60.0))


class World:
    """A controller whose pipeline does what `acts` say, one a try: a function of this world."""

    def __init__(self, folder: Any, acts: list[Any], *, again: bool = False, resume: bool = False):
        self.run, self.acts, self.log = RunFolder(folder), list(acts), []
        made = object.__new__(Conductor)
        made._task = ControllerTask(_SCENARIO, str(folder), str(folder), resume=resume)
        made._missing_place, made._restarts = "", 0
        made._run, made._is_restarted, made._writer = self.run, again, None
        made._recorder = SimpleNamespace(add_event=lambda kind, **body: self.log.append(body["text"]))
        made._stop_requested, made._lease = (
            SimpleNamespace(is_set=lambda: False),
            SimpleNamespace(is_expired=False),
        )
        self.controller = made

    def commit(self, step: int) -> None:
        checkpoints = Checkpoints(self.run.checkpoints)
        aside = checkpoints.create_staging_dir(step)
        checkpoints.complete(aside, Manifest("run", step, "pretrain", step, False, 0, "s", {}, {}, 0), {})

    def tries(self) -> list[str]:
        return [line for line in self.log if line in ("from the beginning", "from a commit")]


@pytest.fixture
def world_of(tmp_path, monkeypatch):
    made: list[World] = []

    class Session:
        def __init__(self, scenario: Any, **given: Any):
            made[0].log.append("from a commit" if given["resume"] else "from the beginning")

        def describe_loss(self, error: NonetError) -> str | None:
            return str(error) if isinstance(error, WorkerLost) else None

    class Pipeline:
        def __init__(self, session: Any, recorder: Any, stopped: Any):
            pass

        def run(self) -> bool:
            return made[0].acts.pop(0)(made[0])

    replace_globals(monkeypatch, Conductor._run_with_recoveries, Session=Session, Pipeline=Pipeline)
    clear_away = lambda run: made[0].log.append("cleared away")  # noqa: E731
    replace_globals(monkeypatch, Conductor._remove_processes, reap_run=clear_away)

    def make(*acts: Any, **given: Any) -> World:
        made[:] = [World(tmp_path, list(acts), **given)]
        return made[0]

    return make


def ends(world: World) -> bool:
    return True


def dies(world: World) -> bool:
    raise WorkerLost("trainer-0 died")


def commits_and_dies(world: World) -> bool:
    world.commit(len(world.log))
    raise WorkerLost("trainer-0 died")


def test_a_run_that_lost_a_worker_clears_up_and_goes_on_from_its_newest_commit(world_of):
    world = world_of(commits_and_dies, ends)
    assert world.controller._run_with_recoveries()
    assert world.log == [
        "from the beginning",
        "cleared away",
        "trainer-0 died; continuing from its newest checkpoint",
        "from a commit",
    ]
    assert world.controller._restarts == 1


def test_without_a_commit_it_begins_again_and_the_journal_is_void(world_of):
    def notes_and_dies(world: World) -> bool:
        journal = Journal(world.run.journal)
        journal.write(applied=0)
        journal.close()
        return dies(world)

    world = world_of(notes_and_dies, ends)
    assert world.controller._run_with_recoveries()
    assert world.tries() == ["from the beginning"] * 2
    assert list(read_journal(world.run.journal)) == []


def test_a_restarted_controller_goes_on_from_the_commit_of_its_forerunner(world_of):
    world = world_of(ends, again=True)
    world.commit(3)
    assert world.controller._run_with_recoveries()
    assert world.log == ["cleared away", "the controller was restarted", "from a commit"]


def test_losses_without_progress_end_the_run_and_losses_with_progress_do_not(world_of):
    world = world_of(*[dies] * 9)
    with pytest.raises(WorkerLost):
        world.controller._run_with_recoveries()
    assert len(world.tries()) == MOST_RECOVERIES
    world = world_of(*[commits_and_dies] * 9, ends)
    assert world.controller._run_with_recoveries()
    assert len(world.tries()) == 10


def test_an_error_that_is_no_loss_ends_the_run(world_of):
    def wrong(world: World) -> bool:
        raise NonetError("a wrong turn")

    world = world_of(wrong, ends)
    with pytest.raises(NonetError, match="a wrong turn"):
        world.controller._run_with_recoveries()
    assert len(world.tries()) == 1


@pytest.mark.parametrize("discards", [False, True])
def test_the_end_of_a_stored_run_is_committed_unless_it_failed_before_its_first_checkpoint(
    tmp_path, discards
):
    storage = MemoryStorage()
    copy = RunCopy(MountedRun("s3://feed/run-1", str(tmp_path / "work/run-1")), storage)
    world = World(tmp_path, [])
    world.controller._writer = RunWriter(copy)
    world.controller._writer.start_commits()
    (copy.path / "report.json").write_text("{}")
    world.controller._close_writer(discards=discards)
    assert set(copy.read_tree().files) == (set() if discards else {"report.json"})
    assert set(storage.list_objects("objects")) == copy.get_tree().list_keys()


def test_a_stored_run_bears_outages_for_as_long_as_its_scenario_says(tmp_path, monkeypatch):
    given = []
    open_writer = lambda path, **options: given.append(options["timeout_s"])  # noqa: E731
    replace_globals(monkeypatch, Conductor._open_writer, open_writer=open_writer)
    world = World(tmp_path, [])
    deadlines: Any = SimpleNamespace(deadlines=SimpleNamespace(storage=7.0))
    world.controller._task = ControllerTask(deadlines, str(tmp_path), str(tmp_path), resume=False)
    assert world.controller._open_writer() == (None, None)
    assert given == [7.0]


def test_a_run_with_a_checkpoint_is_not_discarded_because_of_wrong_input(tmp_path):
    copy = RunCopy(MountedRun("s3://feed/run-1", str(tmp_path / "work/run-1")), MemoryStorage())
    world = World(tmp_path, [])
    world.controller._writer = RunWriter(copy)
    manifest = copy.path / "checkpoints/step-000010/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    world.controller._writer.commit()
    world.controller._close_writer(discards=True)
    assert set(copy.read_tree().files) == {"checkpoints/step-000010/manifest.json"}


def test_a_run_that_cannot_be_discarded_stores_its_end_and_frees_its_folder(tmp_path, monkeypatch):
    copy = RunCopy(MountedRun("s3://feed/run-1", str(tmp_path / "work/run-1")), MemoryStorage())
    world = World(tmp_path, [])
    world.controller._writer = RunWriter(copy)
    (copy.path / "outcome.json").write_text("{}")

    def fail(*_: object) -> bool:
        raise StorageError("the server does not answer")

    monkeypatch.setattr(RunWriter, "discard", fail)
    world.controller._close_writer(discards=True)
    assert set(copy.read_tree().files) == {"outcome.json"}
    RunWriter(copy).close()
