"""A session's own steps over groups that answer at once: when commits are due, what is published, where a stage goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stand_ins import Group, Now, Trace

from nonet.controller.groups.handles import EmbeddingHandle, PromptRequest, RolloutHandle, TrainerHandle
from nonet.controller.groups.publishing import Published, publish
from nonet.controller.groups.run_groups import GroupChange
from nonet.controller.record.run_folder import RunFolder, lock_run
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.session import session as sessions
from nonet.controller.session.bound_run import BoundRun
from nonet.controller.session.session import Session
from nonet.controller.session.stage_run import StageRun
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.roles.settings import RolloutRequest, Schedule, StageSetup

BODY = {
    "name": "steps",
    "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "rl": 2}},
    "sparse": {"tables": {"item": {"dim": 8}}},
    "stages": {
        "pretrain": {"epochs": 1},
        "rl": {"steps": 4, "users": 2, "rewards": {"hit": {"weight": 1.0}}},
    },
    "checkpoint": {"every": 3},
}
PRETRAIN = StageSetup("pretrain", first=0, steps=8, users=4, lr=Schedule(peak=1e-3), base=1e-3)
RL = StageSetup(
    "rl",
    first=8,
    steps=4,
    users=2,
    lr=Schedule(peak=1e-3),
    base=1e-3,
    weights={"hit": 1.0},
    rolls_out=True,
    phases=("update", "publish"),
)


class World:
    """A session with its handles over groups that note their calls in `calls`."""

    def __init__(self, folder, apart=False):
        self.calls: list = []
        hosts = SimpleNamespace(actors=["trainer"])
        shard_hosts = SimpleNamespace(actors=["shard"]) if apart else hosts
        self.shards = Group(
            self.calls,
            "shards",
            1,
            shard_hosts,
            count_replica_bytes=[100],
            count_rows=[{"item": 3}],
            slice_map="map",
            pop_counts=[],
            save=[{"rows": ("b", 2)}],
            poll_save=[{"rows": ("b", 2)}],
        )
        self.group = Group(
            self.calls,
            "trainer",
            1,
            hosts,
            update={"loss": 1.0},
            export_weights=b"dense",
            train=[],
            save=[{"dense": ("a", 1)}],
        )
        self.rollout_group = Group(self.calls, "rollout", 1, None if apart else hosts, apply=0)
        self.committed: list = []
        self.log = SimpleNamespace(
            record_applied_step=lambda stage, step: self.calls.append(("applied", (stage.name, step), {})),
            begin_checkpoint=self._begin,
            complete_checkpoint=lambda written, kept_steps: (
                self.calls.append(("finish", (written,), {})) or Path("commit")
            ),
            newest=None,
            open_step=None,
            truncate_to=lambda manifest, stages: self.calls.append(("forget", (manifest.step, stages), {})),
        )
        self.trainer = TrainerHandle(self.group, self.shards, self._enter, buckets=2)
        self.rollout = RolloutHandle(self.rollout_group, {"rl": {"width": 4}}, self._enter)
        scenario = make_scenario(BODY)
        self.processes = SimpleNamespace(
            run=RunFolder(folder),
            scenario=scenario,
            plan=None,
            deadlines=scenario.deadlines,
            refresh_copies=lambda: self.calls.append(("refresh", (), {})),
        )
        self.groups = SimpleNamespace(
            processes=self.processes,
            trainer=self.trainer,
            rollout=self.rollout,
            rewards={},
            find_due_change=lambda name: None,
            load=lambda path, stage: self.calls.append(("load", (path, stage and stage.name), {})),
        )
        self.session = self.open()

    def open(self, resumed_from=None, writer=None):
        """Return a session of the world's run."""
        facts = {"artifacts": {"sids": {"sha256": "a"}}, "data": {"held_out": {"valid": 0}}}
        bound_run = BoundRun(
            self.processes, self.log, Trace(), writer, resumed_from, lambda text: None, lambda *_: None
        )
        return StageRun(bound_run, facts, {"pretrain": PRETRAIN, "rl": RL}, self.groups)

    def _enter(self, stage, phase):
        self.calls.append(("enter", (stage, phase), {}))

    def _begin(self, stage, done, version, artifacts, worlds):
        self.committed.append((stage.name, done, version))
        return Path("aside")

    def names(self):
        return [name for name, *_ in self.calls]

    def call(self, name):
        """Arguments and options of the one call of this name."""
        ((_, arguments, options),) = [call for call in self.calls if call[0] == name]
        return arguments, options


class Answer:
    """An answer that comes once it has a `value` or an `error`."""

    value = error = None

    def get(self, timeout_s=None):
        if self.error:
            raise self.error
        return self.value

    def done(self):
        return bool(self.value or self.error)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def apart(tmp_path):
    return World(tmp_path, apart=True)


# --- commits ----------------------------------------------------------------------------------------------------------


def test_commits_are_made_every_so_many_steps_at_the_end_of_a_stage_and_when_asked(world):
    world.session.begin("pretrain")
    for step in range(8):
        world.session.commit(step, now=step == 3)
    assert [done for _, done, _ in world.committed] == [3, 4, 6, 8]
    assert [arguments for name, arguments, _ in world.calls if name == "applied"] == [
        ("pretrain", step) for step in range(8)
    ]


def test_a_commit_is_written_by_trainers_and_shards(world):
    world.session.begin("pretrain")
    world.session.commit(2)
    assert world.call("trainer.save") == (("aside", False), {})
    assert world.call("shards.save") == (("aside", False), {})


def test_a_commit_counts_once_everybody_has_written_and_steps_go_on_meanwhile(world):
    session, late = world.session, Answer()
    world.group._answers["save"], world.group._answers["poll_save"] = [None], late
    session.begin("pretrain")
    assert session.commit(2) is None
    assert "finish" not in world.names()
    session.commit(3)  # asks, and does not wait
    assert world.call("trainer.poll_save") == ((False,), {})
    session.commit(4)
    assert world.names().count("trainer.poll_save") == 1, "one question at a time"
    late.value = [{"dense": ("a", 1)}]
    session.commit(5, now=True)
    written = [arguments for name, arguments, _ in world.calls if name == "finish"]
    assert written == [({"dense": ("a", 1), "rows": ("b", 2)},)] * 2
    begins = [index for index, name in enumerate(world.names()) if name == "trainer.save"]
    assert world.names().index("finish") < begins[1], "at most one is open"


def test_a_commit_is_waited_for_before_the_next_is_opened(world):
    session = world.session
    world.group._answers["save"], world.group._answers["poll_save"] = [None], Answer()
    world.group._answers["poll_save"].value = [{"dense": ("a", 1)}]
    session.begin("pretrain")
    session.commit(2)
    assert "finish" not in world.names()
    session.checkpoint_writer.write(PRETRAIN, 4, wait=False)
    order = [name for name in world.names() if name in ("trainer.save", "finish")]
    assert order == ["trainer.save", "finish", "trainer.save"]


@pytest.mark.parametrize("how", ["now", "last", "foreground", "committed"])
def test_who_needs_a_whole_commit_waits_for_it(world, how):
    session = world.session
    world.group._answers["poll_save"] = [{"dense": ("a", 1)}]
    if how == "foreground":
        session.scenario = make_scenario(BODY | {"checkpoint": {"every": 3, "background": False}})
    session.begin("pretrain")
    if how == "committed":
        world.group._answers["save"] = [None]
        assert session.commit(2) is None
        world.session.checkpoint_log.newest = (Path("commit"), None)
        assert session.wait_for_checkpoint() == Path("commit")
        assert ("trainer.poll_save", (True,), {}) in world.calls
    else:
        step = {"now": 3, "last": 7, "foreground": 2}[how]
        assert session.commit(step, now=how == "now") == Path("commit")
        assert world.call("trainer.save") == (("aside", True), {})
    assert world.names().count("finish") == 1


@pytest.mark.parametrize("end", ["next step", "end"])
def test_what_stops_the_writing_is_raised_at_the_next_step_or_at_the_end(world, end):
    session, late = world.session, Answer()
    world.group._answers["save"], world.group._answers["poll_save"] = [None], late
    entered = Session(make_scenario(BODY), run=session.run)
    entered._running = session
    entered._exit_stack.callback(lambda: world.calls.append(("stop", (), {})))
    entered._exit_stack.push(session.finish)
    session.begin("pretrain")
    session.commit(2)
    session.commit(3)
    late.error = CheckpointError("the disk is full")
    ending = {"next step": lambda: session.commit(4), "end": lambda: entered.__exit__(None, None, None)}
    with pytest.raises(CheckpointError, match="disk is full"):
        ending[end]()
    assert "finish" not in world.names()
    assert ("stop" in world.names()) == (end == "end")


def test_two_workers_that_write_one_file_are_an_error(world):
    world.shards._answers["save"] = [{"dense": ("b", 2)}]
    world.session.begin("pretrain")
    with pytest.raises(CheckpointError, match="aside/dense was written by two workers"):
        world.session.commit(2, now=True)


def restored(world, manifest, artifacts=None, writer=None):
    manifest.artifacts = artifacts or {"sids": "a"}
    world.session = world.open((Path("newest"), manifest), writer)
    world.session.restore()


def test_a_stage_goes_on_where_its_commit_left_it_and_others_begin_afresh(world):
    restored(world, SimpleNamespace(stage="pretrain", stage_step=3, last=False, step=3, version=5))
    assert world.call("load") == ((Path("newest"), "pretrain"), {})
    assert world.call("forget") == ((3, ["pretrain", "rl"]), {})
    assert world.session.version == 5
    assert world.session.begin("pretrain") == 3
    assert "trainer.begin" not in world.names()
    assert world.session.begin("rl") == 0
    assert world.call("trainer.begin") == ((RL,), {})


def test_results_that_a_resume_has_cut_are_stored_as_deleted_before_other_nodes_fetch_again(world):
    world.log.store_changes = lambda: world.calls.append(("store", (), {}))
    manifest = SimpleNamespace(stage="pretrain", stage_step=3, last=False, step=3, version=5)
    restored(world, manifest, writer=SimpleNamespace())
    assert [name for name in world.names() if name in ("forget", "store", "refresh")] == [
        "forget",
        "store",
        "refresh",
    ]


@pytest.fixture
def opening(tmp_path, monkeypatch):
    """A session whose processes start, but whose artifacts do not open; `log` is what was opened and closed."""
    log: list = []

    class Opened:
        """An object that notes that it was closed."""

        def __init__(self, name):
            self.close = lambda: log.append(f"{name} closed")

        def check(self):
            """Find all nodes healthy."""

        def add(self, *span):
            log.append(span[1])

    class Writer(Opened):
        def collect_from(self, collect):
            log.append(("collect", collect))

        def commit(self):
            """Store nothing."""

        def start_commits(self):
            log.append("commits")

    class Processes:
        binding = SimpleNamespace(list_dead_workers=lambda: log.append("looked") or ["rollout-0"])
        collect_files = "files"

        def __init__(self, *_):
            log.append("started")

        def stop(self, at_once):
            log.append(("stopped", at_once))

    def fail(bound_run, folder):
        raise RuntimeError("the call failed")

    names = {"CheckpointLog": "log", "open_trace": "trace", "ClusterProbes": "probes"}
    for function, name in names.items():
        monkeypatch.setattr(sessions, function, lambda *_, name=name: Opened(name))
    monkeypatch.setattr(sessions, "open_writer", lambda *_, **__: Writer("writer"))
    monkeypatch.setattr(sessions, "GroupProcesses", Processes)
    monkeypatch.setattr(sessions, "open_artifacts", fail)
    for function in ("check_ray_environment", "ensure_ray", "plan_live", "write_plan", "write_run"):
        monkeypatch.setattr(sessions, function, lambda *_: None)
    session = Session(make_scenario(BODY), run=RunFolder(tmp_path / "run"))
    vars(session)["log"] = log
    return session


def test_a_session_that_a_dead_worker_keeps_from_opening_says_so(opening):
    with pytest.raises(RuntimeError) as error:
        opening.__enter__()
    assert ("stopped", True) in opening.log
    assert opening.describe_loss(error.value) == "rollout-0 died: the call failed"
    assert opening.progress.phase == "tokenise"
    with pytest.raises(AttributeError, match="a session has no 'groups' before it is entered"):
        _ = opening.groups


def test_an_interrupted_search_for_dead_workers_stops_the_processes_while_the_folder_is_locked(opening):
    def interrupt():
        raise KeyboardInterrupt

    def stop(processes, at_once):
        with pytest.raises(ConfigError, match="being run by another process"):
            lock_run(opening.run)
        opening.log.append(("stopped", at_once))

    sessions.GroupProcesses.binding = SimpleNamespace(list_dead_workers=interrupt)
    sessions.GroupProcesses.stop = stop
    with pytest.raises(KeyboardInterrupt):
        opening.__enter__()
    assert ("stopped", True) in opening.log
    lock_run(opening.run).close()


@pytest.fixture
def opened(opening, monkeypatch):
    """The session of `opening`, whose artifacts open; its run notes in `log` that it was finished."""

    def finish(kind, error, trace):
        opening.log.append("finished")

    running = SimpleNamespace(restore=lambda: None, finish=finish, step=3, validation=None, scenario="copies")
    monkeypatch.setattr(sessions, "open_artifacts", lambda *_: {})
    monkeypatch.setattr(sessions, "_open_groups", lambda *_: running)
    return opening


def test_a_session_waits_for_its_open_checkpoint_before_it_stops_the_processes(opened):
    with opened:
        assert opened.scenario == "copies"
        assert "finished" not in opened.log
    assert [entry for entry in opened.log if entry in ("finished", ("stopped", False))] == [
        "finished",
        ("stopped", False),
    ]


def test_the_error_of_a_loop_stays_and_errors_of_closing_are_its_notes(opened):
    def stop(processes, at_once):
        raise OSError("no answer")

    sessions.GroupProcesses.stop = stop
    with pytest.raises(CheckpointError, match="first") as error, opened:
        raise CheckpointError("first")
    assert error.value.__notes__ == ["while closing: OSError: no answer"]
    lock_run(opened.run).close()


def test_an_error_of_closing_is_raised_if_it_is_the_first_and_the_rest_is_closed(opened):
    def stop(processes, at_once):
        raise OSError("no answer")

    sessions.GroupProcesses.stop = stop
    with pytest.raises(OSError, match="no answer"), opened:
        pass
    assert opened.log[-1] == "writer closed"
    lock_run(opened.run).close()


def test_a_session_is_entered_once(opened):
    with opened:
        pass
    with pytest.raises(ConfigError, match="a session is entered once"):
        opened.__enter__()
    assert "" not in opened.seconds


@pytest.mark.parametrize("name", ["step", "validation", "scenario"])
def test_what_belongs_to_the_run_cannot_be_set_on_the_session(opened, name):
    with pytest.raises(AttributeError, match=name):
        setattr(opened, name, 7)
    with opened:
        with pytest.raises(AttributeError, match=name):
            setattr(opened, name, 7)
        opened.add_note = print
        assert opened.step == 3


def test_workers_that_are_being_stopped_are_not_asked_for_files(opening):
    with pytest.raises(RuntimeError):
        opening.__enter__()
    asked = [entry for entry in opening.log if isinstance(entry, tuple)]
    assert asked == [("collect", "files"), ("collect", tuple), ("stopped", True)]


def test_what_was_opened_is_closed_the_newest_first_and_the_folder_is_free(opening):
    with pytest.raises(RuntimeError):
        opening.__enter__()
    assert opening.log[:4] == ["started", ("collect", "files"), "commits", "bind"]
    assert opening.log[-4:] == ["probes closed", "log closed", "trace closed", "writer closed"]
    lock_run(opening.run).close()


def test_a_commit_that_ends_its_stage_brings_weights_alone(world):
    restored(world, SimpleNamespace(stage="pretrain", stage_step=8, last=True, step=8, version=5))
    assert world.call("load") == ((Path("newest"), None), {})


def test_a_commit_of_other_artifacts_is_refused(world):
    with pytest.raises(CheckpointError, match="trained from other artifacts"):
        restored(
            world,
            SimpleNamespace(stage="rl", stage_step=1, last=False, step=9, version=1),
            artifacts={"sids": "b"},
        )


# --- prompts, updates, versions -----------------------------------------------------------------------------------------


def test_prompts_publish_first_and_an_update_names_its_step(world):
    session = world.session
    for step, prompts in session.iterate_prompts("rl"):
        assert (prompts.stage, prompts.step) == ("rl", step)
        assert "rollout.apply" in world.names()
        world.calls.clear()
        session.rollout.generate(prompts)
        session.trainer.update(session.stage, step, Now(), {"hit": Now()})
        (size, request), _ = world.call("rollout.generate_step")
        assert size == RL.users
        assert request == RolloutRequest("rl", step, width=4, version=session.version)
        (update, *_), _ = world.call("trainer.update")
        assert (update.stage, update.step) == (RL, step)
        assert update.weights == {"hit": 1.0}, "the objectives of the session"
        assert session.publish() == step + 2
        assert session.version == step + 2
    assert step == 3


def test_scores_of_ones_own_loop_are_for_the_step_that_was_entered(world):
    steps = []
    world.session.groups.rewards = {
        "rl": SimpleNamespace(score=lambda beams, **options: steps.append(options["step"]))
    }
    world.session.begin_rl("rl")
    world.session.reward.score(Now())
    for _ in world.session.iterate_prompts("rl"):
        world.session.reward.score(Now())
    world.session.reward.score(Now(), step=-1)
    assert steps == [None, 0, 1, 2, 3, -1]


def test_after_rows_are_loaded_every_row_is_sent_and_after_groups_changed_the_weights_too(apart):
    session = apart.session
    session.publish("rl")
    session.load(Path("newest"))
    assert session.published == Published(1, 1, None, "full")
    session.publish("rl")
    assert session.published.route == "full"
    session.groups.change = lambda *_: None
    session.checkpoint_log.write_record = lambda **_: None
    session.change_groups("rl", GroupChange((), (), ()), None)
    assert session.published == Published(2)


def test_a_fused_rollout_is_sent_nothing(world):
    published = publish(world.trainer, world.rollout, Published(3), 1 << 30, RL)
    assert published == Published(4, None, None, "shared")
    assert world.call("rollout.apply") == ((4,), {})
    assert "shards.export" not in world.names()


def test_a_rollout_apart_is_sent_weights_and_every_row_once_then_what_changed(apart):
    published = publish(apart.trainer, apart.rollout, Published(), 1 << 30, RL)
    assert published == Published(1, 1, 1, "full")
    assert apart.call("shards.export") == ((1, None), {})
    assert [arguments for name, arguments, _ in apart.calls if name == "trainer.export_weights"] == [
        (0,),
        (1,),
    ]
    received = [arguments for name, arguments, _ in apart.calls if name == "rollout.receive"]
    assert [(version, bucket.value) for version, bucket in received] == [(1, b"dense")] * 2
    _, options = apart.call("rollout.apply")
    assert options["dense"] is True
    assert "sparse" in options
    apart.calls.clear()
    published = publish(apart.trainer, apart.rollout, published, 1 << 30, RL)
    assert published == Published(2, 2, 2, "delta")
    assert apart.call("shards.export") == ((2, 1), {})


def test_tables_over_the_limit_stay_with_their_shards_and_are_read_by_key(apart):
    published = publish(apart.trainer, apart.rollout, Published(), 99, RL)
    assert published == Published(1, 1, None, "by key")
    assert apart.call("shards.publish") == ((1,), {})
    _, options = apart.call("rollout.apply")
    assert options["slices"].value == "map"
    assert options["shards"].value == ["shard"]
    published = publish(apart.trainer, apart.rollout, published, 100, RL)
    assert published.route == "full", "it holds no version of its own"


def test_who_takes_turns_is_on_its_device_when_it_is_asked(apart):
    publish(apart.trainer, apart.rollout, Published(), 1 << 30, RL)
    order = [call[1] if call[0] == "enter" else call[0] for call in apart.calls]
    assert order.index(("rl", "publish")) < order.index("trainer.export_weights")
    assert order.index(("rl", "rollout")) < order.index("rollout.apply")
    assert order.index("shards.export") < order.index(("rl", "rollout"))


def test_a_supervised_stage_lets_go_of_what_was_published(world):
    world.session.begin("pretrain")
    assert "shards.unpublish" in world.names()
    world.calls.clear()
    world.session.begin("rl")
    assert "shards.unpublish" not in world.names()


def test_shards_apart_serve_while_trainers_step(apart, world):
    for there, serves in ((apart, 1), (world, 0)):
        there.trainer.train(PRETRAIN, 0, 5)
        assert there.call("trainer.train") == ((PRETRAIN, 0, 5), {})
        assert there.names().count("shards.serve") == serves


def test_a_stage_that_is_not_there_is_named(world):
    with pytest.raises(ConfigError, match="there is no stage 'rll'; stages: pretrain, rl"):
        world.session.begin("rll")
    with pytest.raises(ConfigError, match="no stage has begun"):
        _ = world.session.stage


def test_rows_move_only_to_shards_there_are(world):
    world.shards.world = 3
    handle = EmbeddingHandle(world.trainer)
    assert handle.reshard(2) == [{"item": 3}]
    assert world.call("trainer.reshard") == (([0, 1],), {})
    for wrong in ([3], [1, 1], [], 4):
        with pytest.raises(ConfigError, match="distinct shards out of the run's 3"):
            handle.reshard(wrong)


def test_prompts_are_cut_over_the_rollouts(world):
    users, positions = np.arange(5), np.arange(5) + 3
    world.rollout.generate(PromptRequest("rl", 2, 0, users, positions), 9)
    (first, second, request), _ = world.call("rollout.generate")
    assert first.value is users
    assert second.value is positions
    assert request.version == 9
