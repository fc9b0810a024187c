"""A lost worker is recovered whoever met it first: an error of ours, or one of Ray's that nobody translated. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from stand_ins import replace_globals

from nonet.controller import single_controller
from nonet.controller.record import RunFolder
from nonet.controller.setup import read_interruptions
from nonet.errors import ConfigError, DeadlineExceeded, PlacementError, ServiceMissing


@pytest.fixture
def conduct(monkeypatch, tmp_path):
    """Run a pipeline that raises `errors` one after the other and then ends; return whether it ended and what was noted."""

    def play(*errors, lost="trainer-0 died", replace_s=60.0):
        left, notes = list(errors), []

        class Pipeline:
            def __init__(self, *_):
                pass

            def run(self):
                if left:
                    raise left.pop(0)
                return True

        cls = single_controller.SingleController.__ray_metadata__.modified_class  # type: ignore[attr-defined]
        session = SimpleNamespace(describe_loss=lambda error: lost)
        replace_globals(
            monkeypatch, cls._run_with_recoveries, Pipeline=Pipeline, Session=lambda *_, **__: session
        )
        conductor = cls.__new__(cls)
        scenario = SimpleNamespace(deadlines=SimpleNamespace(replace=replace_s))
        conductor._task = SimpleNamespace(resume=False, scenario=scenario, folder=".", timeout_s=1.0)
        conductor._missing_place, conductor._restarts = "", 0
        conductor._run, conductor._is_restarted, conductor._writer = RunFolder(tmp_path), None, None
        conductor._stop_requested = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: None)
        conductor._lease = SimpleNamespace(is_expired=False)
        conductor._recorder = SimpleNamespace(add_event=lambda kind, text: notes.append(text))
        conductor._find_newest_checkpoint = lambda: None
        conductor._remove_processes = lambda: False
        return conductor._run_with_recoveries(), notes

    return play


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("late"), DeadlineExceeded("late")])
def test_a_run_that_lost_a_worker_goes_on_whatever_error_told_of_it(conduct, tmp_path, error):
    assert conduct(error) == (True, ["trainer-0 died; continuing from the beginning"])
    assert [part["why"] for part in read_interruptions(RunFolder(tmp_path))] == ["trainer-0 died"]


@pytest.mark.parametrize("error", [GetTimeoutError("late"), ConfigError("no")])
def test_an_error_without_a_lost_worker_ends_the_run(conduct, error):
    with pytest.raises(type(error)):
        conduct(error, lost=None)


def test_a_run_that_lost_a_worker_waits_for_a_node_however_often_it_asks(conduct):
    missing = PlacementError("group 'rollout' needs 1 NPU")
    ended, notes = conduct(DeadlineExceeded("late"), *[missing] * 9)
    assert ended
    assert notes[1:] == ["waiting at most 60 s for nodes: group 'rollout' needs 1 NPU"]


def test_a_run_that_lost_a_node_waits_for_an_actor_that_a_reward_calls_and_a_new_run_does_not(conduct):
    missing = ServiceMissing("actor://pricing/margin: no actor 'margin' runs")
    ended, notes = conduct(DeadlineExceeded("late"), *[missing] * 9)
    assert ended
    assert notes[1:] == [f"waiting at most 60 s for an actor: {missing}"]
    with pytest.raises(ServiceMissing):
        conduct(missing, lost=None)


@pytest.mark.parametrize(("errors", "replace_s"), [((), 60.0), ((DeadlineExceeded("late"),), -1.0)])
def test_a_run_without_a_place_fails_if_it_lost_nothing_or_has_waited_long_enough(conduct, errors, replace_s):
    with pytest.raises(PlacementError):
        conduct(*errors, PlacementError("no place"), replace_s=replace_s)
