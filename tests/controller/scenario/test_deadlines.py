"""How long waits may take is said by the scenario, and a wait that ran out names the key."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from views import scenario

from nonet.controller.setup.worker_setup import make_run_setup
from nonet.deadlines import DEFAULTS, Deadline, Deadlines, suggest_longer_deadline
from nonet.errors import ConfigError

LONGER = {name: f"{minutes}min" for minutes, name in enumerate(Deadlines.model_fields, 11)}


def test_every_deadline_is_a_key_of_the_scenario_with_todays_default():
    assert scenario().deadlines == DEFAULTS
    told = scenario(deadlines=LONGER).deadlines
    assert [getattr(told, name) for name in LONGER] == [60.0 * n for n in range(11, 11 + len(LONGER))]
    assert [getattr(told, name).key for name in LONGER] == [f"deadlines.{name}" for name in LONGER]


def test_workers_are_told_the_deadlines():
    told = make_run_setup(scenario(deadlines={"step": "10min", "save": "2h"})).deadlines
    step = told.step
    assert told.save == 7200.0
    assert (step, step.key) == (600.0, "deadlines.step")
    again = pickle.loads(pickle.dumps(step.scale_by(2)))
    assert (again, again.key) == (1200.0, "deadlines.step")


@pytest.mark.parametrize("wrong", ["0s", "-1", "soon"])
def test_a_deadline_is_a_duration_above_zero(wrong):
    with pytest.raises(ConfigError, match=r"deadlines\.step"):
        scenario(deadlines={"step": wrong})


def test_who_waits_too_long_says_which_key_to_raise():
    assert "deadlines.save" in suggest_longer_deadline(Deadline(1.0, "deadlines.save"))
    assert suggest_longer_deadline(1.0) == suggest_longer_deadline(None) == ""


class Never:
    """A group whose calls are never answered; it notes how long it was waited for."""

    def __init__(self, waits, world=1):
        self.waits, self.world, self.hosts = waits, world, SimpleNamespace(name="x", actors=[])

    def __getattr__(self, method):
        def call(*args, **kwargs):
            return SimpleNamespace(get=lambda timeout_s=None: self._waited(method, timeout_s), refs=())

        return call

    def _waited(self, method, timeout_s):
        self.waits.append((method, timeout_s))
        return ()


def test_the_controllers_waits_are_as_long_as_the_scenario_says():
    from nonet.controller.groups.handles import TrainerHandle
    from nonet.workers.roles.settings import Schedule, StageSetup

    told = scenario(deadlines={"step": "7s", "reshard": "3h"}).deadlines
    waits: list = []
    group = Never(waits)
    handle = TrainerHandle(group, group, deadlines=told)  # type: ignore[arg-type]
    stage = StageSetup("rl", first=0, steps=30, users=8, lr=Schedule(peak=1.0), base=1.0)
    handle.begin(stage)
    handle.train(stage, 10, 20)
    handle.reshard([0])
    along = ("pop_counts", "count_replica_bytes")  # waited for together with what they come along with
    assert [wait for wait in waits if wait[0] not in along] == [
        ("begin", 7.0),
        ("train", 70.0),
        ("reshard", 10800.0),
    ]


def test_a_shard_writes_its_part_of_a_commit_within_the_scenarios_deadline(monkeypatch, tmp_path):
    from nonet.workers.roles import embedding

    waits: list[float] = []
    saving = SimpleNamespace(poll_result=lambda wait, timeout_s: waits.append(timeout_s))
    monkeypatch.setattr(embedding, "save", lambda world, folder: saving)
    embedding.EmbeddingShard(make_run_setup(scenario(deadlines={"save": "2h"}))).save(str(tmp_path))
    assert waits == [7200.0]
