"""Engines: the versions that answer, each built aside and swapped in whole, and those before them, kept to go back to.

A thread looks at the registry (and at the run's newest commit); what it finds is built beside what answers. A question holds
the version that it was given to until it is answered, so no answer is of two versions. A version that cannot be built is named
in `problems` and never served.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from nonet.deploy.serving.features import OpenRun
from nonet.deploy.serving.service.follower import Follower
from nonet.errors import CheckpointError, ConfigError
from nonet.models.generation import Corpus
from nonet.models.inference import Answer, Engine, Question, States, TensorBatch
from nonet.workers.registry import Serving

_KEPT = 3  # versions that no longer answer and are kept built
_LOOK_S = 0.1


class Lane:
    """A version that answers: its engine and its queue."""

    def __init__(self, engine: Engine, queue: TensorBatch[Question, Answer]):
        self.engine, self.queue = engine, queue


class Engines:
    """Of a run. `follow`: publish and serve the run's newer commits; `queue`: options of every `TensorBatch`; `state_bytes`:
    kept of users by each version, 0 for none."""

    def __init__(
        self,
        run: OpenRun,
        *,
        follow: bool = True,
        device: str = "cpu",
        queue: Mapping[str, Any] | None = None,
        state_bytes: int = 256 << 20,
        look_s: float = _LOOK_S,
    ):
        self._run, self._device, self._look_s = run, device, look_s
        self._follower = Follower(run) if follow else None
        self._queue_options = dict(queue or {})
        self._turn, self._state_bytes = threading.Lock(), state_bytes
        self._lanes: dict[int, Lane] = {}
        self._now: tuple[Serving, Mapping[int, Lane]] = (Serving(), MappingProxyType({}))
        self._used: dict[int, float] = {}
        self.problems: dict[str, str] = {}
        self.swaps = 0
        self._stopped = threading.Event()
        self._catalogue = run.catalogues.newest()
        self._renew: Callable[[Corpus], None] | None = None
        self._look()
        if not self._now[1]:
            problem = next(iter(self.problems.values()), "it has no version")
            raise ConfigError(f"{run.folder.id} cannot be served: {problem}")
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)
        self._thread.start()

    @property
    def serving(self) -> Serving:
        """Who is answered by what at this moment."""
        return self._now[0]

    @property
    def lanes(self) -> Mapping[int, Lane]:
        """Versions that answer somebody."""
        return self._now[1]

    def submit(self, question: Question, within_s: float) -> tuple[Future[Answer], int]:
        """The answer to be, and the version that gives it: all of it."""
        serving, lanes = self._now
        version = serving.version_of(question.user)
        lane = lanes.get(version if version is not None else -1) or next(iter(lanes.values()))
        return lane.queue.submit(question, within_s), lane.engine.version

    async def ask(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """The same, waited for."""
        future, version = self.submit(question, within_s)
        return await asyncio.wrap_future(future), version

    def watch_catalogue(self, renew: Callable[[Corpus], None]) -> None:
        """Tell `renew` of every later version of the catalogue, before anything answers over it."""
        self._renew = renew

    def facts(self) -> dict[int, dict[str, float]]:
        """Of each version that answers: what waits, what was computed, what is kept of users."""
        found = {}
        for version, lane in self.lanes.items():
            measures, states = lane.queue.measures, lane.engine.states
            found[version] = {
                "queue": len(lane.queue),
                "batches": measures.batches,
                "batched_questions": measures.questions,
                "batched_tokens": measures.cost,
                "batch_seconds": measures.seconds,
                "batch_size": measures.newest,
                "late": measures.late,
                "state_hits": states.hits if states else 0,
                "state_misses": states.misses if states else 0,
                "state_bytes": states.nbytes if states else 0,
            }
        return found

    def waiting(self) -> int:
        """Questions in all queues."""
        return sum(len(lane.queue) for lane in list(self._lanes.values()))

    def close(self) -> None:
        """Answer what waits, then end."""
        self._stopped.set()
        self._thread.join()
        for lane in self._lanes.values():
            lane.queue.close()

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_s):
            try:
                self._look()
            except Exception as error:  # the versions at hand go on; the next look may find it mended
                self._problem("registry", error)

    def _look(self) -> None:
        newest = self._run.catalogues.newest()
        if newest is not self._catalogue and self._renew is not None:
            self._renew(newest)
            self._catalogue = newest
        if self._follower is not None:
            self._follower.look()
            self._noted(self._follower.problem)
        serving = self._run.registry.serving
        if serving.turn == self._now[0].turn and self._now[1]:
            return
        wanted = serving.versions
        lanes = {version: lane for version in wanted if (lane := self._lane(version)) is not None}
        if not lanes or (serving.default not in lanes and self._now[1]):
            self._now = (_moved(self._now[0], serving), self._now[1])  # what answers goes on
            return
        self._now = (serving, MappingProxyType(lanes))
        self.swaps += 1
        self._retire(set(lanes))

    def _lane(self, version: int) -> Lane | None:
        if version not in self._lanes:
            try:
                recommender = self._run.recommender(self._run.registry.version(version), self._device)
                engine = Engine(
                    recommender, version, States(self._state_bytes) if self._state_bytes else None
                )
                engine.warm()
            except (ConfigError, CheckpointError) as error:
                self._problem(f"version {version}", error)
                return None
            queue = TensorBatch[Question, Answer](
                engine.answer, engine.cost, turn=self._turn, **self._queue_options
            )
            self._lanes[version] = Lane(engine, queue)
            self.problems.pop(f"version {version}", None)
        self._used[version] = time.monotonic()
        return self._lanes[version]

    def _retire(self, answering: set[int]) -> None:
        """Let go of all but the newest of those that answer nobody. What waits in their queues is answered first."""
        idle = sorted(set(self._lanes) - answering, key=lambda version: self._used[version])
        for version in idle[: max(0, len(idle) - _KEPT)]:
            lane = self._lanes.pop(version)
            threading.Thread(target=lane.queue.close, daemon=True).start()

    def _noted(self, problem: str | None) -> None:
        if problem is None:
            self.problems.pop("commit", None)
        else:
            self.problems["commit"] = problem

    def _problem(self, what: str, error: Exception) -> None:
        self.problems[what] = " ".join(str(error).split())


def _moved(old: Serving, new: Serving) -> Serving:
    """What was served goes on, but for items that are withdrawn; the new state is not looked at again."""
    return Serving(old.default, old.shares, new.refused, new.withdrawn, new.turn)
