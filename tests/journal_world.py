"""Processes that append to one journal, one file operation at a time in an order that a seed decides.

Each actor is a thread that stops in front of every operation on files, locks and clocks of `nonet.journal`, until the world lets
it go on. The world may let one wait for long (a suspended process), or end one at any operation (a killed process): a write then
leaves any part of its bytes, and the kernel closes its files. Disks may be full or fail.
"""

from __future__ import annotations

import errno
import fcntl
import io
import math
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonet import atomic, journal
from nonet.errors import DeadlineExceeded
from nonet.journal import JournalOptions, LineJournal, StorageFull

DAY_S = 86_400.0


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Actor:
    """A simulated process: its open files, and for how many turns it is suspended."""

    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    files: set[int] = field(default_factory=set)
    suspended: int = 0
    killed: bool = False
    done: bool = False
    error: BaseException | None = None


@dataclass
class Line:
    """A line that a process tried to append."""

    began: int  # a number that grows with every event
    began_s: float
    ended: float = math.inf
    ended_s: float = math.inf
    longest_s: float = 0.0
    outcome: str = "unknown"  # "acknowledged" or "refused", if the process has lived to know


class World:
    """A folder, a clock and the processes that use them.

    Args:
        path: The journal.
        seed: The seed of the schedule.
        faults: Whether processes are killed and suspended, and disks fail.
    """

    def __init__(self, path: Path, seed: int, *, faults: bool = True, retention_days: float | None = None):
        self.path, self.draw, self.faults = path, random.Random(seed), faults
        self.options = JournalOptions(self.draw.choice([1, 60, 200]), retention_days)
        # The probabilities that an operation kills its process or suspends it, that a write kills it, and that a disk fails.
        self.kills, self.pauses, self.torn_writes, self.disk_faults = self.draw.choice(
            [(0.01, 0.03, 0.05, 0.05), (0.0, 0.03, 0.0, 0.3), (0.0, 0.03, 0.2, 0.0)]
        )
        self.now_s, self.events = 1e9, 0
        self.lines: dict[bytes, Line] = {}
        self.reads: list[
            tuple[int, float, list[bytes]]
        ] = []  # when it began, the time of its end, and the lines
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._back = threading.Semaphore(0)

    def install(self, monkeypatch: Any) -> None:
        """Put the world between `nonet.journal` and the machine."""
        monkeypatch.setattr(journal, "os", _Stand(os, self, _OS_CALLS))
        monkeypatch.setattr(journal, "fcntl", _Stand(fcntl, self, {"flock": _call}))
        monkeypatch.setattr(journal, "time", self)
        for module in (journal, atomic):
            monkeypatch.setattr(module, "sync", lambda path: self.stop())
        scan = LineJournal._scan_sealed_segments
        monkeypatch.setattr(
            LineJournal, "_scan_sealed_segments", lambda this: (self.stop(), scan(this), self.stop())[1]
        )
        world = self

        class SlowReader(io.BufferedReader):
            """A file that is read in two parts."""

            def read(self, size: int | None = -1) -> bytes:
                content = super().read(world.draw.randrange(1, 200)) or b""
                world.stop()
                return content + super().read()

        monkeypatch.setattr(journal, "open_file", lambda path: SlowReader(io.FileIO(path)))

    # --- the clock, as `nonet.journal` reads it -----------------------------------------------------------------------

    def time(self) -> float:
        """Return the time of day."""
        return self.now_s

    monotonic = time

    def sleep(self, seconds: float) -> None:
        """Let more time pass than was asked for, since nobody wants to look 1,500 times."""
        self.stop()
        self.now_s += 0.2

    # --- actors -------------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], None], *, latest_start: int = 1) -> None:
        """Add an actor that does some work, from one of the next turns on."""
        actor = Actor(suspended=self.draw.randrange(latest_start))

        def run() -> None:
            actor.go.acquire()
            try:
                if not actor.killed:
                    work()
            except Killed:
                pass
            except BaseException as error:
                actor.error = error
            actor.done = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self._actors.append(actor)

    def stop(self) -> None:
        """Wait until the scheduler lets this actor do its next operation."""
        actor = self._current
        if actor is None:
            return
        if not actor.killed:
            self._back.release()
            actor.go.acquire()
        if actor.killed:
            raise Killed

    def run(self) -> None:
        """Let all actors end, in an order that the seed decides."""
        while living := [actor for actor in self._actors if not actor.done]:
            ready = [actor for actor in living if not actor.suspended] or living
            for actor in living:
                actor.suspended = max(0, actor.suspended - 1)
            actor = self.draw.choice(ready)
            if self.faults:
                chance = self.draw.random()
                actor.killed |= chance < self.kills
                if self.kills < chance < self.kills + self.pauses:
                    actor.suspended = self.draw.choice([20, 60, 400])
                if chance > 0.99:
                    self.now_s += self.draw.choice([1.0, 3600.0, 0.1 * DAY_S])
            self._current = actor
            actor.go.release()
            self._back.acquire()
            self._current = None
            if actor.done:
                for file in actor.files:
                    os.close(file)
                if actor.error is not None:
                    raise actor.error

    # --- what actors do -----------------------------------------------------------------------------------------------

    def append_lines(self, name: str, count: int) -> None:
        """Open the journal, append lines of different lengths, and record what became of each."""
        try:
            opened = LineJournal(self.path, self.options)
        except (DeadlineExceeded, OSError):
            return
        for number in range(count):
            line = f"{name}.{number}:".encode() + b"abcdefgh"[number % 8 :][:1] * self.draw.choice([1, 9, 90])
            entry = self.lines[line] = Line(self.count_event(), self.now_s)
            try:
                opened.append(line)
                entry.outcome = "acknowledged"
            except (StorageFull, DeadlineExceeded, OSError):
                entry.outcome = "refused"
            finally:
                entry.longest_s = self.now_s - entry.began_s
            entry.ended, entry.ended_s = self.count_event(), self.now_s
        opened.close()

    def read(self) -> None:
        """Read all lines of the journal."""
        began = self.count_event()
        lines = [line for _, line in LineJournal(self.path, self.options, read_only=True).iterate_lines()]
        self.reads.append((began, self.now_s, lines))

    def count_event(self) -> int:
        """Return the next number of an event."""
        self.events += 1
        return self.events

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that each reader saw whole lines once, in the order of time, and all that were acknowledged before it began.

        The last reader must see no refused line, and none that is older than the retention and a tenth of it.
        """
        days = self.options.retention_days
        for began, ended_s, lines in self.reads:
            assert not [line for line in lines if line not in self.lines], "a line that nobody appended"
            assert len(set(lines)) == len(lines), "a line that was read twice"
            for line, entry in self.lines.items():
                is_due = entry.outcome == "acknowledged" and entry.ended < began
                is_young = days is None or entry.began_s >= ended_s - days * DAY_S
                assert line in lines or not (is_due and is_young), f"{line!r} was acknowledged and is missing"
            newer_ended = self.events + 1
            for entry in (self.lines[line] for line in reversed(lines)):
                assert entry.began < newer_ended, (
                    "a line before one that was acknowledged before it was appended"
                )
                newer_ended = min(newer_ended, entry.ended)
        _, ended_s, last = self.reads[-1]
        for _, _, lines in self.reads:
            assert [line for line in lines if line in last] == [line for line in last if line in lines]
        assert not [line for line in last if self.lines[line].outcome == "refused"]
        if days is not None:
            # A process that was suspended after it had looked at the age of the segment appends to an older one.
            longest_s = max(entry.longest_s for entry in self.lines.values())
            oldest_s = ended_s - 1.1 * days * DAY_S - longest_s
            assert all(self.lines[line].ended_s >= oldest_s for line in last), "a line is kept for too long"


class _Stand:
    """A module of which some functions stop an actor before they work."""

    def __init__(self, module: Any, world: World, calls: dict[str, Any]):
        self._module, self._world, self._calls = module, world, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name not in self._calls:
            return real
        return lambda *arguments: self._calls[name](self._world, real, *arguments)


def _call(world: World, real: Callable[..., Any], *arguments: Any) -> Any:
    """Call the real function once the actor may go on."""
    world.stop()
    return real(*arguments)


def _open(world: World, real: Callable[..., int], *arguments: Any) -> int:
    """Open a file that ends with its process."""
    world.stop()
    file = real(*arguments)
    if world._current:
        world._current.files.add(file)
    return file


def _close(world: World, real: Callable[[int], None], file: int) -> None:
    """Close a file."""
    world.stop()
    real(file)
    if world._current:
        world._current.files.discard(file)


def _write(world: World, real: Callable[..., int], file: int, content: bytes) -> int:
    """Write all or some bytes; a killed process and a full disk leave any number of them."""
    if world.faults and world._current and world.draw.random() < world.torn_writes:
        world._current.killed = True
    fault = world.draw.random() if world.faults else 1.0
    part = bytes(content)[: world.draw.randrange(len(content) + 1)]
    try:
        world.stop()
    except Killed:
        _put(world, real, file, part)
        raise
    if fault < world.disk_faults:
        _put(world, real, file, part)
        raise OSError(errno.ENOSPC, "No space left on device")
    return _put(world, real, file, part if fault > 0.8 and part else content)


def _put(world: World, real: Callable[..., int], file: int, content: bytes) -> int:
    """Write bytes at the time of the world."""
    written = real(file, content)
    os.utime(file, (world.now_s, world.now_s))
    return written


def _truncate(world: World, real: Callable[..., None], file: int, size: int) -> None:
    """Truncate a file."""
    world.stop()
    real(file, size)
    os.utime(file, (world.now_s, world.now_s))


def _sync(world: World, real: Callable[[int], None], file: int) -> None:
    """Wait for a disk that may fail."""
    world.stop()
    if world.faults and world.draw.random() < world.disk_faults:
        raise OSError(errno.EIO, "Input/output error")


_OS_CALLS = {
    "open": _open,
    "close": _close,
    "write": _write,
    "ftruncate": _truncate,
    "fdatasync": _sync,
    "pread": _call,
    "replace": _call,
    "stat": _call,
    "fstat": _call,
}
