"""Stand-ins for what the controller drives: groups that note their calls and answer at once, and a session over them."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

from nonet.controller.groups.handles import PromptRequest
from nonet.deadlines import DEFAULTS
from nonet.workers.roles.settings import StageSetup


def replace_globals(monkeypatch: Any, method: Any, **values: Any) -> None:
    """Replace names that a method of an actor class reads from its module.

    Ray pickles an actor class by value. If a pickle is read in this process, the methods of the class get globals of their own.
    """
    for name, value in values.items():
        monkeypatch.setitem(inspect.unwrap(method).__globals__, name, value)


class Now:
    """A future whose value is there."""

    def __init__(self, value: Any = None):
        self.value = value

    def get(self, timeout_s: float | None = None) -> Any:
        return self.value

    def settle(self, timeout_s: float | None = None) -> Now:
        return self

    def set_deadline(self, timeout_s: float) -> None:
        """Nothing is waited for."""

    def done(self) -> bool:
        return True

    is_late_or_done = done
    refs: tuple = ()

    def request_row_counts(self) -> tuple:
        """Nothing to count: it is there."""
        return ()

    get_row_counts = request_row_counts


class Group:
    """A worker group: every method answers with what `answers` has for its name; `calls` holds (name, arguments, options)."""

    def __init__(self, calls: list, role: str, world: int = 1, hosts: Any = None, **answers: Any):
        self._calls, self.role, self.world, self._answers = calls, role, world, answers
        self.hosts = hosts if hosts is not None else SimpleNamespace(actors=["actor"])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Now:
            self._calls.append((f"{self.role}.{name}", arguments, options))
            answer = self._answers.get(name)
            return answer if hasattr(answer, "get") and hasattr(answer, "done") else Now(answer)

        return call


class Recorder:
    """Notes what a run would show."""

    def __init__(self):
        self.steps: list[tuple[str, int, dict]] = []
        self.events: list[tuple[str, dict]] = []
        self.begun: list[tuple[str, int, int]] = []

    def begin(self, stage, steps, done):
        self.begun.append((stage, steps, done))

    def record_step(self, stage, step, values):
        self.steps.append((stage, step, dict(values)))

    def record_metrics(self, *record, **more):
        pass

    def record_tables(self, *record):
        pass

    def flush_trackers(self):
        pass

    def get_tracking(self):
        return {}

    def add_event(self, kind, **body):
        self.events.append((kind, body))


class Trace:
    """Spans that nobody keeps."""

    @contextmanager
    def record_span(self, name, **facts):
        yield

    def add(self, *event, **facts):
        pass


class _Scored(dict):
    """Scores of every prompt."""

    quarantined: ClassVar[list] = []
    retried = 0


class LoopSession:
    """What the shipped stages ask of a session; `done` lists what they did, in order."""

    def __init__(self, scenario, stages: dict[str, StageSetup], records=None, scores=None, at: int = 0):
        self.scenario, self.stages, self.trace, self.done = scenario, stages, Trace(), []
        self._records, self._scores, self._at = records, scores, at
        self.validation = self.objectives = None
        self.steering = SimpleNamespace(pop_changed=lambda: False)
        self.replay_steps: list[int] = []  # at which an earlier part of the run changed the number of workers
        self.scaling = SimpleNamespace(
            find_next_step=lambda stage, step: next((s for s in self.replay_steps if s > step), None)
        )
        self.trainer = SimpleNamespace(train=self._train, update=self._update, pop_table_counts=dict)
        self.rollout = SimpleNamespace(generate=lambda prompts: ("beams", prompts.step), absent=0)
        self.deadlines = DEFAULTS
        self.reward = SimpleNamespace(
            score=lambda beams: _Scored({name: Now(s) for name, s in self._scores.items()}),
        )

    def begin(self, name):
        return self._at

    def iterate_prompts(self, name):
        for step in range(self._at, self.stages[name].steps):
            yield step, PromptRequest(name, step, 2)

    def publish(self, stage=None, *, behind=False):
        self.done.append("publish")

    def end(self, step):
        """Do nothing, because the last commit ended the stage."""

    def commit(self, step, *, now=False):
        self.done.append(("commit", step, now))

    def save_applied_steps(self):
        self.done.append("save")

    def _train(self, stage, start, stop):
        self.done.append(("train", start, stop))
        return [self._records(step) for step in range(start, stop)]

    def _update(self, stage, step, beams, scores):
        assert beams[1] == step
        self.done.append(("update", step))
        return {"loss": 0.5, "prompts": 2.0}
