"""What has been started is stopped, whatever ends a start or interrupts a stop. No Ray: processes are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from views import scenario

from nonet.controller.groups import binding, group_processes
from nonet.controller.groups.binding import GroupBinding
from nonet.controller.groups.group_processes import GroupChange, GroupProcesses
from nonet.controller.groups.run_groups import RunGroups
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario import RewardOptions
from nonet.controller.session.steering import RewardSteering
from nonet.deadlines import DEFAULTS
from nonet.errors import PlacementError
from nonet.workers.runtime import ActorGroup, actors

ERRORS = [PlacementError("a node is missing"), OSError("no room"), KeyboardInterrupt()]


def fail(error):
    """Return a function that raises an error."""

    def raise_error(*arguments, **options):
        raise error

    return raise_error


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Return a function that starts processes; `stops` has the arguments of the calls that stopped them."""
    stops: list = []

    class Binding:
        hosts, groups = {}, ()

        def __init__(self, *arguments, **options):
            """Start nothing."""

        def stop(self, *, at_once):
            stops.append(at_once)

        def change(self, stops, starts):
            """Change nothing."""

        def set_threads(self, groups):
            """Change nothing."""

    beats = SimpleNamespace(stop=lambda: stops.append("heartbeat"))
    monkeypatch.setattr(group_processes, "GroupBinding", Binding)
    monkeypatch.setattr(group_processes, "keep_alive", lambda hosts, life_s: beats)
    monkeypatch.setattr(GroupProcesses, "_check_shared", lambda *_: None)

    def start():
        plan = SimpleNamespace(ledger=SimpleNamespace(list_offloading_lines=tuple))
        trace = SimpleNamespace(collect=lambda hosts: None)
        return GroupProcesses(scenario(), RunFolder(tmp_path), plan, 5.0, trace, "pretrain")  # type: ignore[arg-type]

    start.stops = stops
    return start


@pytest.mark.parametrize("error", ERRORS)
def test_processes_are_stopped_whatever_ends_their_start(processes, monkeypatch, error):
    monkeypatch.setattr(GroupProcesses, "_check_shared", fail(error))
    with pytest.raises(type(error)):
        processes()
    assert processes.stops == ["heartbeat", True]
    monkeypatch.setattr(group_processes, "Watchdog", fail(error))
    with pytest.raises(type(error)):
        processes()
    assert processes.stops[2:] == [True]


@pytest.mark.parametrize("error", ERRORS)
def test_all_processes_are_stopped_whatever_ends_a_change_of_groups(processes, monkeypatch, error):
    started = processes()
    monkeypatch.setattr(GroupProcesses, "_check_shared", fail(error))
    with pytest.raises(type(error)):
        started.change(GroupChange((), (), ()), stops_attached=False)
    assert processes.stops == ["heartbeat", True]


def test_processes_are_stopped_at_once_if_the_wait_for_their_spans_is_interrupted(processes):
    started = processes()
    started._trace.collect = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        started.stop()
    assert processes.stops == ["heartbeat", True]


def test_an_interrupted_wait_for_the_teardown_of_roles_kills_the_processes(monkeypatch):
    log: list = []
    bound = GroupBinding.__new__(GroupBinding)
    hosts = SimpleNamespace(request_stop=lambda: ["answer"], kill=lambda: log.append("killed"))
    bound.hosts, bound._placement_groups = {"trainer": hosts}, {"trainer": "room"}  # type: ignore[assignment]
    monkeypatch.setattr(binding.ray, "wait", fail(KeyboardInterrupt()))
    monkeypatch.setattr(binding, "remove_placement_group", log.append)
    with pytest.raises(KeyboardInterrupt):
        bound.stop()
    assert log == ["killed", "room"]


@pytest.mark.parametrize("error", ERRORS)
def test_a_group_of_which_one_process_does_not_start_leaves_none(monkeypatch, error):
    killed: list = []

    def start(group, rank, seat):
        if rank == 2:
            raise error
        return rank

    monkeypatch.setattr(actors, "ensure_ray", lambda: None)
    monkeypatch.setattr(ActorGroup, "_start_actor", start)
    monkeypatch.setattr(actors.ray, "kill", lambda actor, no_restart: killed.append(actor))
    with pytest.raises(type(error)):
        ActorGroup({}, workers=3)
    assert killed == [0, 1]


@pytest.mark.parametrize("error", ERRORS)
def test_the_processes_of_a_reward_are_stopped_whatever_ends_its_start(processes, monkeypatch, error):
    started, killed = processes(), []
    hosts = SimpleNamespace(wait_until_ready=fail(error), kill=lambda: killed.append("hit"))
    monkeypatch.setattr(group_processes, "ActorGroup", lambda *_, **__: hosts)
    monkeypatch.setattr(group_processes, "make_reward_spec", lambda *_: None)
    monkeypatch.setattr(group_processes.ray, "available_resources", lambda: {"CPU": 4.0})
    with pytest.raises(type(error)):
        started.start_reward("rl", "hit", RewardOptions(weight=1.0))
    assert killed == ["hit"]
    assert not started.hosts


@pytest.mark.parametrize("error", ERRORS)
def test_a_reward_that_does_not_open_or_score_is_stopped_whatever_the_error(error):
    stopped: list = []
    group = SimpleNamespace(open=fail(error))
    processes = SimpleNamespace(
        start_reward=lambda *_: group, stop_reward=lambda stage, name: stopped.append(name)
    )
    run_groups = SimpleNamespace(processes=processes, _folders={}, deadlines=DEFAULTS)
    with pytest.raises(type(error)):
        RunGroups.start_reward(run_groups, "rl", "opened", RewardOptions(weight=1.0))  # type: ignore[arg-type]
    session = SimpleNamespace(
        run=RunFolder(None),  # type: ignore[arg-type]
        get_rewards=lambda stage: None,
        groups=SimpleNamespace(processes=processes, start_reward=processes.start_reward),
    )
    steering = SimpleNamespace(
        _session=session,
        _stage="rl",
        objectives=SimpleNamespace(rewards={}),
        _check_copy=lambda command: None,
        _rehearse=fail(error),
    )
    command = {"name": "rehearsed", "options": {"use": "hit", "weight": 1.0}}
    with pytest.raises(type(error)):
        RewardSteering._attach(steering, command)  # type: ignore[arg-type]
    assert stopped == ["opened", "rehearsed"]
