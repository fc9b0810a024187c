"""The active versions: each is built in the background and swapped in as a whole; earlier ones are kept for rollbacks.

A lane is a version that is built: its engine and its queue. It is active while the registry directs traffic to it.

One thread polls the registry and does nothing slow, so rollbacks, promotions and withdrawals take effect
immediately. A version of the registry that is not built yet is built in its own thread. After that, the
registry decides again which version serves which users, so a version that was rolled back while it was
built receives no traffic. A question keeps its version until it is answered, so no answer mixes two
versions. `problems` names versions that cannot be built, which is tried again with pauses.
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

from nonet.deploy.opened import Away, OpenedRun
from nonet.deploy.serving.service.follower import RunFollower
from nonet.errors import ConfigError
from nonet.models.generation import Corpus
from nonet.models.inference import (
    Answer,
    ClickEngine,
    InferenceEngine,
    PrefixStates,
    Question,
    TensorBatch,
)
from nonet.workers.registry import ServingState

_MAX_IDLE_LANES = 3  # number of versions that stay built without traffic, so that a rollback is immediate
_POLL_S = 0.05  # between two polls of the registry
_RETRY_S, _MAX_RETRY_S = (
    1.0,
    60.0,
)  # first and longest pause before a version is built again that could not be built
CHECKPOINTS = "checkpoints"
"""Value of `follow` with which checkpoints from the middle of a stage are served too."""


class Building(Away):
    """The version was rolled back, and the version to go back to is still being built."""


class VersionLane:
    """A lane: the engine of a built version, and the queue of its questions."""

    def __init__(self, engine: InferenceEngine | ClickEngine, queue: TensorBatch[Question, Answer]):
        self.engine, self.queue = engine, queue


class EnginePool:
    """The versions of a run that receive traffic.

    Args:
        run: The run whose versions are served.
        follow: Whether to publish and serve the checkpoints that the run's stages select; "checkpoints" for
            every checkpoint.
        device: The device that computes the models.
        queue: Options of every `TensorBatch`.
        state_bytes: Memory of each version for cached states of users; 0 for none.
        look_s: Seconds between two polls of the registry.

    Raises:
        ConfigError: There is no version to serve, or the served one cannot be built.
    """

    def __init__(
        self,
        run: OpenedRun,
        *,
        follow: bool | str = True,
        device: str = "cpu",
        queue: Mapping[str, Any] | None = None,
        state_bytes: int = 0,
        look_s: float = _POLL_S,
    ):
        self._run, self._device, self._look_s = run, device, look_s
        self._queue_options = dict(queue or {})
        self._compute_lock, self._state_bytes = threading.Lock(), state_bytes  # one batch at a time
        self._built_lanes: dict[int, VersionLane] = {}  # active and idle ones
        self._target_state = ServingState()  # of the registry, with versions that may not be built yet
        # What is in effect, replaced as a whole so that readers need no lock: the state, and the active lanes.
        self._active: tuple[ServingState, Mapping[int, VersionLane]] = (ServingState(), MappingProxyType({}))
        self._last_active_s: dict[int, float] = {}  # by version, in monotonic seconds
        self._building: dict[int, threading.Thread] = {}
        # Of versions that could not be built: the number of failures, and when to try again, in monotonic seconds.
        self._failures: dict[int, tuple[int, float]] = {}
        self._change_lock = threading.RLock()
        self.problems: dict[str, str] = {}
        self.swaps = 0  # number of changes of the versions that are in effect
        self._stopped = threading.Event()
        self._catalogue, self._catalogue_lock = run.catalogues.get_newest(), threading.Lock()
        self._renew: Callable[[Corpus], None] | None = None
        self._follower = RunFollower(run, mid_stage=follow == CHECKPOINTS) if follow else None
        self._open()
        self._threads = [
            threading.Thread(target=self._repeat, args=(poll, name), name=name, daemon=True)
            for poll, name in ((self._follow_registry, "registry"), (self._follow_catalogue, "catalogue"))
        ]
        for thread in self._threads:
            thread.start()
        if self._follower is not None:
            self._follower.start()

    def _open(self) -> None:
        """Publish a version if there is none, and build those with traffic. Raises ConfigError if none can be served."""
        if self._follower is not None:
            self._follower.check_once()
            self._record_problem(self._follower.problem)
        elif not self._run.has_version:
            self._run.publish_newest()  # it is served until another one is published
        self._target_state = self._run.registry.serving
        for version in self._target_state.versions:
            self._build(version)
        self._activate()
        if not self.lanes:
            problem = next(iter(self.problems.values()), "it has no version")
            raise ConfigError(f"{self._run.folder.id} cannot be served: {problem}")

    @property
    def serving(self) -> ServingState:
        """The serving state that is currently in effect."""
        return self._active[0]

    @property
    def lanes(self) -> Mapping[int, VersionLane]:
        """The lanes that currently receive traffic by version, the default one first."""
        return self._active[1]

    def submit(self, question: Question, within_s: float) -> tuple[Future[Answer], int]:
        """Submit a question to the version of its user, caller or request.

        Args:
            question: The question to answer.
            within_s: Seconds within which the answer is needed.

        Returns:
            The future answer, and the number of the version that gives it.

        Raises:
            Building: The version was rolled back, and the version to go back to is still being built.
        """
        serving, lanes = self._active
        version = serving.select_version(question.user or question.traffic)
        # A version that is not built yet is replaced by the first lane.
        lane = lanes.get(version if version is not None else -1) or next(iter(lanes.values()), None)
        if lane is None:
            raise Building(f"version {serving.default} is being built after a rollback")
        return lane.queue.submit(question, within_s), lane.engine.version

    async def ask(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """Submit a question, and return its answer and the number of its version; errors are those of `submit`."""
        future, version = self.submit(question, within_s)
        return await asyncio.wrap_future(future), version

    def watch_catalogue(self, renew: Callable[[Corpus], None]) -> None:
        """Call `renew` with every later version of the catalogue, before any version answers with it."""
        self._renew = renew

    def get_facts(self) -> dict[int, dict[str, float]]:
        """Return figures of each active version: queue, batches and cached states."""
        figures_by_version = {}
        for version, lane in self.lanes.items():
            measures, states = lane.queue.measures, lane.engine.states
            figures_by_version[version] = {
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
        return figures_by_version

    def count_waiting(self) -> int:
        """Return the number of queued questions of all built versions."""
        return sum(len(lane.queue) for lane in list(self._built_lanes.values()))

    def explain_unready(self) -> str | None:
        """Return why no model would answer, or it is not known what is served; None if it is known and all queues work."""
        lanes = self.lanes
        if (problem := self._run.registry.problem) is not None:
            return problem
        if not lanes:
            return f"version {self.serving.default} is being built"
        dead_versions = [version for version, lane in lanes.items() if not lane.queue.alive]
        return f"the queue of version {dead_versions[0]} has died" if dead_versions else None

    def close(self) -> None:
        """Answer the queued questions, then stop."""
        self._stopped.set()
        if self._follower is not None:
            self._follower.stop()
        for thread in (*self._threads, *list(self._building.values())):
            thread.join()
        for lane in self._built_lanes.values():
            lane.queue.close()

    def _repeat(self, poll: Callable[[], None], name: str) -> None:
        """Call a function every `look_s` seconds until `close`, and record its last error in `problems` under a name."""
        while not self._stopped.wait(self._look_s):
            try:
                poll()
                self.problems.pop(name, None)
            except Exception as error:  # built versions keep answering, and the next poll may succeed
                self._record_problem(error, name)

    def _follow_registry(self) -> None:
        """Read the registry's state, start to build missing versions, and activate built ones. Nothing here is slow."""
        if self._follower is not None:
            self._record_problem(self._follower.problem)
        target = self._run.registry.announced
        with self._change_lock:
            has_changed, now_s = target != self._target_state, time.monotonic()
            self._target_state = target
            missing = [
                version
                for version in target.versions
                if version not in self._built_lanes
                and version not in self._building
                and (has_changed or now_s >= self._failures.get(version, (0, 0.0))[1])
            ]
            for version in missing:
                thread = threading.Thread(
                    target=self._build_in_background, args=(version,), name="build", daemon=True
                )
                self._building[version] = thread
                thread.start()
        if has_changed:
            self._activate()

    def _follow_catalogue(self) -> None:
        """Pass a newer catalogue to the function of `watch_catalogue`.

        This happens before a version with that catalogue is built, so the features know the items that it lists.
        """
        with self._catalogue_lock:
            newest = self._run.catalogues.get_newest()
            if newest is not self._catalogue and self._renew is not None:
                self._renew(newest)
                self._catalogue = newest

    def _activate(self) -> None:
        """Direct traffic to built versions as the registry says.

        While the registry's default version is not built, the state before stays in effect; but refusals and
        withdrawals always take effect.
        """
        with self._change_lock:
            target, (old, _) = self._target_state, self._active
            if target.default not in self._built_lanes:
                going_on = old.default in self._built_lanes and old.default not in target.refused
                shares = {
                    version: share for version, share in old.shares.items() if version not in target.refused
                }
                new = replace(target, default=old.default if going_on else target.default, salts=old.salts)
            else:
                shares, new = target.shares, target
            built_shares = {
                version: share for version, share in shares.items() if version in self._built_lanes
            }
            new = replace(new, shares=built_shares)
            lanes = {
                version: self._built_lanes[version]
                for version in new.versions
                if version in self._built_lanes
            }
            self._active = (new, MappingProxyType(lanes))
            now_s = time.monotonic()
            self._last_active_s.update(dict.fromkeys(lanes, now_s))
            self.swaps += (new.default, new.shares) != (old.default, old.shares)
            self._retire_lanes(set(lanes))

    def _build_in_background(self, version: int) -> None:
        """Build a version and activate it; a background thread runs this."""
        try:
            self._build(version)
        finally:
            with self._change_lock:
                self._building.pop(version, None)
            self._activate()

    def _build(self, version: int) -> None:
        """Build the lane of a version and add it to the built ones; if that fails, record the reason in `problems`."""
        try:
            self._follow_catalogue()
            states = PrefixStates(self._state_bytes) if self._state_bytes else None
            engine = self._run.load_engine(self._run.registry.read_version(version), self._device, states)
            if self._state_bytes and engine.states is None:
                raise ConfigError(
                    f"state_bytes is {self._state_bytes}, but this model keeps no states of users between requests; "
                    "remove state_bytes"
                )
            engine.warm()
        except Exception as error:
            with self._change_lock:
                count = self._failures.get(version, (0, 0.0))[0] + 1
                pause_s = min(_MAX_RETRY_S, _RETRY_S * 2 ** (count - 1))
                self._failures[version] = (count, time.monotonic() + pause_s)
            self._record_problem(error, f"version {version}")
            return
        queue = TensorBatch[Question, Answer](
            engine.answer, engine.estimate_cost, turn=self._compute_lock, **self._queue_options
        )
        with self._change_lock:
            self._built_lanes[version] = VersionLane(engine, queue)
            self._last_active_s[version] = time.monotonic()
            self._failures.pop(version, None)
            self.problems.pop(f"version {version}", None)

    def _retire_lanes(self, active_versions: set[int]) -> None:
        """Remove idle lanes except for those that were active last; their queued questions are answered first."""
        idle_versions = sorted(
            set(self._built_lanes) - active_versions, key=lambda version: self._last_active_s[version]
        )
        for version in idle_versions[: max(0, len(idle_versions) - _MAX_IDLE_LANES)]:
            lane = self._built_lanes.pop(version)
            threading.Thread(target=lane.queue.close, daemon=True).start()

    def _record_problem(self, problem: Exception | str | None, name: str = "commit") -> None:
        """Record a problem in `problems` under a name; None removes the one of that name."""
        if problem is None:
            self.problems.pop(name, None)
        else:
            self.problems[name] = " ".join(str(problem).split())
