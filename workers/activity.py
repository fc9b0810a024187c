"""Descriptions of what a worker is doing, read from the stacks of its threads, for messages about late workers.

A call runs on the work thread. In a pipeline that thread often waits for the helper threads (`sparse-...`); the
description then is that of a helper thread, if possible of one that is not itself waiting for other ranks. A worker's own
frames are those of this package and of the user's files, not those of the standard library and installed packages.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = str(
    Path(__file__).parent.parent
)  # Folder of nonet, whose frames are own frames even if it is installed.
_FOREIGN_PREFIXES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<"}
)
# Parts of the paths of the code in which a thread waits for other ranks.
_EXCHANGES = ("torch/distributed/", "embedding/exchange/all_to_all.py", "embedding/exchange/shared_memory.py")
_TIMEOUT_MESSAGE = re.compile(r"timed out|timeout|no message from rank", re.IGNORECASE)
_LOST_MESSAGE = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed", re.IGNORECASE)
_QUEUE_FUNCTIONS = (
    "_next",
    "_put",
)  # Functions in which a thread of nonet.embedding.training.pipeline waits.
_HELPER_PREFIX = "sparse-"  # Beginning of the names of the pipeline's helper threads.


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """What one worker is doing at the moment.

    Attributes:
        who: Name of the worker.
        call: The call that it runs as "role.method"; "" if it is idle.
        for_s: Seconds since the call began.
        at: Innermost frame of the worker's own code: "file.py:12 function"; "" if there is none.
        waits: Whether it is in a collective or an exchange and therefore waits for other ranks.
        silent: Whether it did not answer the request for its activity in time.
        stacks: The stacks of all of its threads as text.
    """

    who: str
    call: str = ""
    for_s: float = 0.0
    at: str = ""
    waits: bool = False
    silent: bool = False
    stacks: str = ""

    def describe(self) -> str:
        """Return a clause that says what the worker is doing, such as "rollout-0 is in rollout.generate for 12 s"."""
        if self.silent:
            return f"{self.who} does not answer"
        if not self.call:
            return f"{self.who} is idle"
        return f"{self.who} is in {self.call} for {self.for_s:.0f} s" + (f" at {self.at}" if self.at else "")


@dataclass(frozen=True, slots=True)
class _ThreadState:
    """The state of one thread.

    Attributes:
        own_frame: Innermost frame of the worker's own code: "file.py:12 function"; "" if there is none.
        is_in_exchange: Whether the thread is in a collective or an exchange.
        waits_at_queue: Whether the thread waits at a queue of the pipeline.
    """

    own_frame: str
    is_in_exchange: bool
    waits_at_queue: bool


def describe_activity(worker_name: str, call: str, elapsed_s: float, thread_id: int) -> WorkerActivity:
    """Describe what a thread of this process is doing.

    Args:
        worker_name: Name of the worker.
        call: The call that runs as "role.method"; "" if the worker is idle.
        elapsed_s: Seconds since the call began.
        thread_id: Identifier of the work thread.
    """
    if not call:
        return WorkerActivity(worker_name, stacks=dump_stacks())
    helper_ids = [t.ident for t in threading.enumerate() if t.name.startswith(_HELPER_PREFIX) and t.ident]
    frames = sys._current_frames()
    threads = [
        _summarise_stack(traceback.extract_stack(frames[ident]))
        for ident in (thread_id, *helper_ids)
        if ident in frames
    ]
    if not threads:
        return WorkerActivity(worker_name, call, elapsed_s, stacks=dump_stacks())
    described, *helpers = threads
    if (
        described.waits_at_queue
    ):  # It waits for helper threads: describe one that computes, else one in an exchange.
        busy = [thread for thread in helpers if thread.own_frame]  # An idle helper thread has no own frame.
        described = min(busy, key=lambda t: (t.waits_at_queue, t.is_in_exchange), default=described)
    return WorkerActivity(
        worker_name,
        call,
        elapsed_s,
        at=described.own_frame,
        waits=described.is_in_exchange,
        stacks=dump_stacks(),
    )


def is_peer_timeout(error: BaseException) -> bool:
    """Return whether an error is the time-out of an exchange or a collective, which other ranks caused by being late."""
    return _is_of_exchange(error) and bool(_TIMEOUT_MESSAGE.search(str(error)))


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error is that of an exchange or a collective whose connection to another rank was closed."""
    return _is_of_exchange(error) and bool(_LOST_MESSAGE.search(str(error)))


def _is_of_exchange(error: BaseException) -> bool:
    """Return whether an error was raised in an exchange or a collective."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(path in frame.filename for frame in frames for path in _EXCHANGES)


def dump_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame first."""
    with tempfile.TemporaryFile() as out:
        faulthandler.dump_traceback(out, all_threads=True)
        out.seek(0)
        return out.read().decode()


def _summarise_stack(stack: traceback.StackSummary) -> _ThreadState:
    """Determine the state of the thread that has this stack."""
    own_frames = [
        frame
        for frame in stack
        if frame.filename.startswith(_PACKAGE) or not frame.filename.startswith(_FOREIGN_PREFIXES)
    ]
    is_in_exchange = any(path in frame.filename for frame in stack for path in _EXCHANGES)
    if not own_frames:
        return _ThreadState("", is_in_exchange, waits_at_queue=False)
    innermost = own_frames[-1]
    in_pipeline = innermost.filename.endswith("embedding/training/pipeline.py")
    return _ThreadState(
        f"{_shorten_path(innermost.filename)}:{innermost.lineno} {innermost.name}",
        is_in_exchange,
        waits_at_queue=in_pipeline and innermost.name in _QUEUE_FUNCTIONS,
    )


def _shorten_path(file: str) -> str:
    """Shorten a path: below the package's folder to the path relative to it, elsewhere to the last folder and the name."""
    if file.startswith(_PACKAGE):
        return str(Path(file).relative_to(_PACKAGE))
    return "/".join(Path(file).parts[-2:])
