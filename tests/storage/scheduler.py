"""A scheduler that lets one of several actors run at a time, in an order that a seed decides.

An actor is a function on a thread of its own. It runs until it pauses: before and after each request to the storage, before
each change of a file, and while it waits for a lock. A schedule can suspend an actor at any pause for a long time, and kill it.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.errors import StorageError
from nonet.storage.objects import StoredObject
from tests.storage.memory_storage import MemoryStorage

_actors: dict[int, Actor] = {}  # by the identity of their thread


class KilledError(BaseException):
    """Stands for the end of a process."""


def make_signal() -> threading.Lock:
    """Return a lock that one thread acquires and another one releases: the fastest way to hand over control."""
    signal = threading.Lock()
    signal.acquire()
    return signal


class Actor:
    """A process of a model.

    Attributes:
        name: Its name in messages.
        is_done: Whether it has ended.
    """

    def __init__(self, schedule: Schedule, name: str, act: Callable[[], None]):
        self.schedule, self.name, self._act = schedule, name, act
        self.is_done = self.is_killed = False
        self.suspended_steps = 0
        self.dies = False  # whether a model ends it as a kill does
        self.waits_for: Callable[[], bool] | None = None
        self._go = make_signal()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        _actors[threading.get_ident()] = self
        self._go.acquire()
        try:
            if not self.is_killed:
                self._act()
        except KilledError:
            pass
        except BaseException:
            self.schedule.violations.append(f"{self.name}: {traceback.format_exc()}")
        finally:
            del _actors[threading.get_ident()]
            self.schedule.locks.release_all(self)
            self.is_done = True
            self.schedule.returned.release()

    def step(self) -> None:
        """Let the actor run until its next pause."""
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self.schedule.returned.acquire()

    def kill(self) -> None:
        """End the actor at its current pause."""
        self.is_killed = True
        while not self.is_done:
            self.step()

    def pause(self) -> None:
        """Return control to the schedule; called on the actor's own thread."""
        if self.is_killed:  # what its functions do to clean up is not scheduled any more
            return
        if self.dies:
            self.is_killed = True
            raise KilledError
        self.schedule.returned.release()
        self._go.acquire()
        if self.is_killed:
            raise KilledError

    def can_run(self) -> bool:
        return not self.is_done and (self.waits_for is None or self.waits_for())


class Schedule:
    """A run of a model.

    Args:
        seed: The seed of all decisions.
        max_steps: The steps after which every actor is expected to have ended.
    """

    def __init__(self, seed: int, max_steps: int = 20_000):
        self.random, self.storage = random.Random(seed), MemoryStorage()
        self.returned, self.locks = make_signal(), ModelLocks()
        self.actors: list[Actor] = []
        self.violations: list[str] = []
        self._max_steps = max_steps

    def add(self, name: str, act: Callable[[], None]) -> Actor:
        """Add an actor, also while the schedule runs."""
        actor = Actor(self, name, act)
        self.actors.append(actor)
        return actor

    def run(self, check: Callable[[], None]) -> None:
        """Run all actors to their ends, with a check after each step that may have changed what is shared."""
        steps = 0
        while live := [actor for actor in self.actors if not actor.is_done]:
            steps += 1
            ready = [actor for actor in live if actor.can_run()]
            if not ready or steps > self._max_steps:
                self.violations.append("no end: " + ", ".join(actor.name for actor in live))
                break
            awake = [actor for actor in ready if actor.suspended_steps <= 0] or ready
            for actor in ready:
                actor.suspended_steps -= 1
            actor = self.random.choice(awake)
            if self.random.random() < 0.02:
                actor.suspended_steps = self.random.randrange(10, 300)
                continue
            actor.step()
            check()
            if self.violations:
                break
        for actor in self.actors:
            if not actor.is_done:
                actor.kill()


def pause() -> None:
    """Pause the actor of this thread; other threads go on."""
    if actor := _actors.get(threading.get_ident()):
        actor.pause()


class ModelLocks:
    """`Locks` between actors."""

    def __init__(self) -> None:
        self._holders: dict[Path, list[tuple[Actor | None, bool]]] = {}

    def take(self, file: Path, *, shared: bool = False) -> Callable[[], None] | None:
        pause()
        file.parent.stat()  # raises as opening the file would
        holders = self._holders.setdefault(file, [])
        if any(not (shared and is_shared) for _, is_shared in holders):
            return None
        file.touch()
        entry = (_actors.get(threading.get_ident()), shared)
        holders.append(entry)
        return lambda: holders.remove(entry) if entry in holders else None

    @contextmanager
    def hold(self, file: Path) -> Iterator[None]:
        while (release := self.take(file)) is None:
            actor = _actors[threading.get_ident()]
            actor.waits_for = lambda: not self._holders.get(file)
            actor.pause()
            actor.waits_for = None
        try:
            yield
        finally:
            release()

    def release_all(self, actor: Actor) -> None:
        """Release the locks of a process that has ended."""
        for holders in self._holders.values():
            holders[:] = [entry for entry in holders if entry[0] is not actor]


class ModelRLock:
    """A lock between the threads of one process, which are actors; an actor may enter it again."""

    def __init__(self) -> None:
        self._owner: Actor | None = None
        self._depth = 0

    def __enter__(self) -> None:
        actor = _actors.get(threading.get_ident())
        while self._owner not in (None, actor) and actor is not None and not actor.is_killed:
            actor.waits_for = lambda: self._owner is None
            actor.pause()
            actor.waits_for = None
        self._owner, self._depth = actor, self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


class ActorStorage:
    """The storage as one actor reaches it: each request is a pause, and some fail before or after they were applied.

    Args:
        schedule: The schedule.
        failures: The share of writes that fail, half of them after they were applied.
    """

    address = "s3://memory"

    def __init__(self, schedule: Schedule, failures: float):
        self._schedule, self._storage, self.failures = schedule, schedule.storage, failures

    def _request(self, call: Callable[[], Any], *, writes: bool) -> Any:
        pause()
        fails = writes and self._schedule.random.random() < self.failures
        if fails and self._schedule.random.random() < 0.5:
            raise self._make_error()
        result = call()
        pause()
        if fails:
            raise self._make_error()
        return result

    def _make_error(self) -> Exception:
        if self._schedule.random.random() < 0.2:
            return OSError(5, "Input/output error")
        return StorageError("the server does not answer")

    def get(self, key: str) -> StoredObject | None:
        return self._request(lambda: self._storage.get(key), writes=False)

    def put(self, key: str, content: bytes) -> None:
        self._request(lambda: self._storage.put(key, content), writes=True)

    def put_if_absent(self, key: str, content: bytes) -> str:
        return self._request(lambda: self._storage.put_if_absent(key, content), writes=True)

    def replace_if(self, key: str, content: bytes, etag: str) -> str:
        return self._request(lambda: self._storage.replace_if(key, content, etag), writes=True)

    def download(self, key: str, path: Path, size: int) -> None:
        self._request(lambda: self._storage.download(key, path, size), writes=False)

    def list_objects(self, prefix: str) -> dict[str, float]:
        return self._request(lambda: self._storage.list_objects(prefix), writes=False)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        for key in listed:  # a store deletes them one by one
            self._request(lambda key=key: self._storage.delete([key]), writes=True)


@contextmanager
def pause_at_files() -> Iterator[None]:
    """Make each change of a file by an actor a pause, and leave out syncs, which change nothing that a process sees."""
    changed = {(os, name) for name in ("replace", "unlink", "link", "mkdir", "rename")} | {(shutil, "rmtree")}
    before = {(module, name): getattr(module, name) for module, name in changed}
    synced = os.fsync

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            pause()
            return function(*args, **options)

        return call

    try:
        for (module, name), function in before.items():
            setattr(module, name, wrap(function))
        os.fsync = lambda descriptor: None
        yield
    finally:
        os.fsync = synced
        for (module, name), function in before.items():
            setattr(module, name, function)
