"""The active versions: each is built in the background and swapped in as a whole; earlier ones are kept for rollbacks.

One thread polls the registry and does nothing slow, so rollbacks, promotions and withdrawals take effect
immediately. A version of the registry that is not built yet is built in its own thread. After that, the
registry decides again which version serves which users, so a version that was rolled back while it was
built receives no traffic. A question keeps its version until it is answered, so no answer mixes two
versions. `problems` names versions that cannot be built.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nonet.deploy.serving.features import Away, ServedRun
from nonet.deploy.serving.service.follower import RunFollower
from nonet.errors import ConfigError
from nonet.models.generation import Corpus
from nonet.models.inference import Answer, InferenceEngine, PrefixStates, Question, TensorBatch
from nonet.workers.registry import ServingState

_KEPT = 3  # number of inactive versions that stay built
_LOOK_S = 0.05
CHECKPOINTS = "checkpoints"
"""Value of `follow` with which checkpoints from the middle of a stage are served too."""


class Building(Away):
    """The version was rolled back, and the version to go back to is still being built."""


class ActiveVersion:
    """A built version: its engine and its queue."""

    def __init__(self, engine: InferenceEngine, queue: TensorBatch[Question, Answer]):
        self.engine, self.queue = engine, queue


class EnginePool:
    """The versions of a run that receive traffic.

    Args:
        run: The run.
        follow: Whether to publish and serve the checkpoints that the run's stages select; "checkpoints" for
            every checkpoint.
        device: Where the models compute.
        queue: Options of every `TensorBatch`.
        state_bytes: Memory of each version for cached states of users; 0 for none.
        look_s: Seconds between two polls of the registry.

    Raises:
        ConfigError: There is no version to serve, or the served one cannot be built.
    """

    def __init__(
        self,
        run: ServedRun,
        *,
        follow: bool | str = True,
        device: str = "cpu",
        queue: Mapping[str, Any] | None = None,
        state_bytes: int = 0,
        look_s: float = _LOOK_S,
    ):
        self._run, self._device, self._look_s = run, device, look_s
        self._queue_options = dict(queue or {})
        self._turn, self._state_bytes = threading.Lock(), state_bytes
        self._lanes: dict[int, ActiveVersion] = {}
        self._now: tuple[ServingState, Mapping[int, ActiveVersion]] = (ServingState(), MappingProxyType({}))
        self._wanted = ServingState()
        self._used: dict[int, float] = {}
        self._building: dict[int, threading.Thread] = {}
        self._failed: dict[int, int] = {}  # turn of the registry at which a version could not be built
        self._changing = threading.RLock()
        self.problems: dict[str, str] = {}
        self.swaps = 0
        self._stopped = threading.Event()
        self._catalogue, self._renewing = run.catalogues.get_newest(), threading.Lock()
        self._renew: Callable[[Corpus], None] | None = None
        self._follower = RunFollower(run, mid_stage=follow == CHECKPOINTS) if follow else None
        self._open()
        self._threads = [
            threading.Thread(target=self._repeat, args=(look, name), name=name, daemon=True)
            for look, name in ((self._follow_registry, "registry"), (self._follow_catalogue, "catalogue"))
        ]
        for thread in self._threads:
            thread.start()
        if self._follower is not None:
            self._follower.start()

    def _open(self) -> None:
        """Publish a version if there is none, and build the served ones. Raises ConfigError if none can be served."""
        if self._follower is not None:
            self._follower.check_once()
            self._record_problem(self._follower.problem)
        elif not self._run.has_version:
            self._run.publish_newest()  # it is served until another one is published
        self._wanted = self._run.registry.serving
        for version in self._wanted.versions:
            self._build(version)
        self._activate()
        if not self._now[1]:
            problem = next(iter(self.problems.values()), "it has no version")
            raise ConfigError(f"{self._run.folder.id} cannot be served: {problem}")

    @property
    def serving(self) -> ServingState:
        """The serving state that is currently in effect."""
        return self._now[0]

    @property
    def lanes(self) -> Mapping[int, ActiveVersion]:
        """The versions that currently receive traffic."""
        return self._now[1]

    def submit(self, question: Question, within_s: float) -> tuple[Future[Answer], int]:
        """Submit a question to the version of its user, caller or request.

        Args:
            question: The question.
            within_s: Seconds within which the answer is needed.

        Returns:
            The future answer, and the version that gives it.

        Raises:
            Building: The version was rolled back, and the version to go back to is still being built.
        """
        serving, lanes = self._now
        version = serving.select_version(question.user or question.traffic)
        lane = lanes.get(version if version is not None else -1) or next(iter(lanes.values()), None)
        if lane is None:
            raise Building(f"version {serving.default} is being built after a rollback")
        return lane.queue.submit(question, within_s), lane.engine.version

    async def ask(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """Submit a question and wait for its answer."""
        future, version = self.submit(question, within_s)
        return await asyncio.wrap_future(future), version

    def watch_catalogue(self, renew: Callable[[Corpus], None]) -> None:
        """Call `renew` with every later version of the catalogue, before any version answers with it."""
        self._renew = renew

    def get_facts(self) -> dict[int, dict[str, float]]:
        """Return figures of each active version: queue, batches and cached states."""
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

    def count_waiting(self) -> int:
        """Return the number of queued questions."""
        return sum(len(lane.queue) for lane in list(self._lanes.values()))

    def explain_unready(self) -> str | None:
        """Return why no model would answer; None if all queues work."""
        lanes = self.lanes
        if not lanes:
            return f"version {self.serving.default} is being built"
        dead = [version for version, lane in lanes.items() if not lane.queue.alive]
        return f"the queue of version {dead[0]} has died" if dead else None

    def close(self) -> None:
        """Answer the queued questions, then stop."""
        self._stopped.set()
        if self._follower is not None:
            self._follower.stop()
        for thread in (*self._threads, *list(self._building.values())):
            thread.join()
        for lane in self._lanes.values():
            lane.queue.close()

    def _repeat(self, look: Callable[[], None], name: str) -> None:
        """Call a function periodically and record its errors under a name."""
        while not self._stopped.wait(self._look_s):
            try:
                look()
                self.problems.pop(name, None)
            except (
                Exception
            ) as error:  # built versions keep answering; the problem may be gone at the next poll
                self._record_problem(error, name)

    def _follow_registry(self) -> None:
        """Read the serving state and start to build missing versions. Nothing here is slow."""
        if self._follower is not None:
            self._record_problem(self._follower.problem)
        wanted = self._run.registry.announced
        if wanted.turn == self._wanted.turn:
            return
        with self._changing:
            self._wanted = wanted
            for version in wanted.versions:
                if (
                    version in self._lanes
                    or version in self._building
                    or self._failed.get(version) == wanted.turn
                ):
                    continue
                thread = threading.Thread(
                    target=self._build_in_background, args=(version,), name="build", daemon=True
                )
                self._building[version] = thread
                thread.start()
        self._activate()

    def _follow_catalogue(self) -> None:
        """Announce a newer catalogue.

        A version with that catalogue is built afterwards, so the features know the items that it lists.
        """
        with self._renewing:
            newest = self._run.catalogues.get_newest()
            if newest is not self._catalogue and self._renew is not None:
                self._renew(newest)
                self._catalogue = newest

    def _activate(self) -> None:
        """Direct traffic to built versions as the registry says; refusals and withdrawals always take effect."""
        with self._changing:
            wanted, (old, _) = self._wanted, self._now
            shares = wanted.shares
            if wanted.default not in self._lanes:
                going_on = old.default in self._lanes and old.default not in wanted.refused
                shares = {
                    version: share for version, share in old.shares.items() if version not in wanted.refused
                }
                shown = replace(wanted, default=old.default if going_on else wanted.default, salts=old.salts)
            else:
                shown = wanted
            shown = replace(
                shown, shares={version: share for version, share in shares.items() if version in self._lanes}
            )
            lanes = {version: self._lanes[version] for version in shown.versions if version in self._lanes}
            self._now = (shown, MappingProxyType(lanes))
            now = time.monotonic()
            self._used.update(dict.fromkeys(lanes, now))
            self.swaps += (shown.default, shown.shares) != (old.default, old.shares)
            self._retire(set(lanes))

    def _build_in_background(self, version: int) -> None:
        """Build a version in a background thread and activate it."""
        try:
            self._follow_catalogue()
            self._build(version)
        finally:
            with self._changing:
                self._building.pop(version, None)
            self._activate()

    def _build(self, version: int) -> None:
        """Build a version; if that fails, `problems` says why."""
        turn = self._wanted.turn
        try:
            recommender = self._run.load_recommender(self._run.registry.read_version(version), self._device)
            engine = InferenceEngine(
                recommender, version, PrefixStates(self._state_bytes) if self._state_bytes else None
            )
            if self._state_bytes and engine.states is None:
                raise ConfigError(
                    f"state_bytes is {self._state_bytes}, but this model keeps no states of users between requests; "
                    "remove state_bytes"
                )
            engine.warm()
        except Exception as error:
            with self._changing:
                self._failed[version] = turn
            self._record_problem(error, f"version {version}")
            return
        queue = TensorBatch[Question, Answer](
            engine.answer, engine.estimate_cost, turn=self._turn, **self._queue_options
        )
        with self._changing:
            self._lanes[version] = ActiveVersion(engine, queue)
            self._used[version] = time.monotonic()
            self.problems.pop(f"version {version}", None)

    def _retire(self, answering: set[int]) -> None:
        """Remove inactive versions except for the newest ones; their queued questions are answered first."""
        idle = sorted(set(self._lanes) - answering, key=lambda version: self._used[version])
        for version in idle[: max(0, len(idle) - _KEPT)]:
            lane = self._lanes.pop(version)
            threading.Thread(target=lane.queue.close, daemon=True).start()

    def _record_problem(self, problem: Exception | str | None, what: str = "commit") -> None:
        """Record a problem under a name, or remove it."""
        if problem is None:
            self.problems.pop(what, None)
        else:
            self.problems[what] = " ".join(str(problem).split())
