"""Descriptions of what a worker is doing, read from the stacks of its threads, for messages about late workers.

A call runs on the work thread. The work thread of a pipeline waits for its helper threads (`sparse-...`); of these,
the one that is not itself in an exchange is the more informative. Frames in files of Python, of installed packages
and of Ray are not the worker's own.
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

_HERE = str(Path(__file__).parent.parent)  # the package, which may be installed beside the others
_OTHERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<"})
_EXCHANGES = ("torch/distributed/", "embedding/exchange/all_to_all.py", "embedding/exchange/shared_memory.py")
_GAVE_UP = re.compile(r"timed out|timeout|no message from rank", re.IGNORECASE)
_QUEUES = ("_next", "_put")  # of nonet.embedding.training.pipeline
_HELPERS = "sparse-"


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """What one worker is doing at the moment.

    Attributes:
        who: Name of the worker.
        call: The `role.method` that it runs, "" when it is idle.
        for_s: Seconds since the call began.
        at: Innermost frame of the worker's own code: "file.py:12 function".
        waits: Whether it is in a collective or an exchange, and so waits for other ranks.
        silent: Whether it did not answer the question.
        stacks: The stacks of all of its threads.
    """

    who: str
    call: str = ""
    for_s: float = 0.0
    at: str = ""
    waits: bool = False
    silent: bool = False
    stacks: str = ""


@dataclass(frozen=True, slots=True)
class _ThreadState:
    """The innermost own frame of a thread, and whether the thread is in an exchange or at a pipeline's queue."""

    at: str
    exchanges: bool
    queues: bool


def describe_activity(worker_name: str, call: str, elapsed_s: float, thread_id: int) -> WorkerActivity:
    """Describe what a thread of this process is doing.

    Args:
        worker_name: Name of the worker.
        call: The `role.method` that runs, "" when the worker is idle.
        elapsed_s: Seconds since the call began.
        thread_id: Identifier of the work thread.
    """
    if not call:
        return WorkerActivity(worker_name, stacks=dump_stacks())
    helpers = [t.ident for t in threading.enumerate() if t.name.startswith(_HELPERS) and t.ident]
    frames = sys._current_frames()
    seen = [
        _summarise_stack(traceback.extract_stack(frames[ident]))
        for ident in (thread_id, *helpers)
        if ident in frames
    ]
    if not seen:
        return WorkerActivity(worker_name, call, elapsed_s, stacks=dump_stacks())
    own = seen[0]
    if own.queues:  # it waits for a helper: report one that works, else one that waits for other ranks
        busy = [thread for thread in seen[1:] if thread.at]  # an idle saving thread has no own frame
        own = min(busy, key=lambda thread: (thread.queues, thread.exchanges), default=own)
    return WorkerActivity(worker_name, call, elapsed_s, own.at, own.exchanges, stacks=dump_stacks())


def is_peer_timeout(error: BaseException) -> bool:
    """Return whether an exchange or a collective timed out, so that other ranks are late and not the one that raises."""
    frames = traceback.extract_tb(error.__traceback__)
    exchanges = any(place in frame.filename for frame in frames for place in _EXCHANGES)
    return exchanges and bool(_GAVE_UP.search(str(error)))


def dump_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame first."""
    with tempfile.TemporaryFile() as out:
        faulthandler.dump_traceback(out, all_threads=True)
        out.seek(0)
        return out.read().decode()


def _summarise_stack(stack: traceback.StackSummary) -> _ThreadState:
    """Return the innermost own frame of a stack, and whether the stack is in an exchange or at a pipeline's queue."""
    own = [
        frame for frame in stack if frame.filename.startswith(_HERE) or not frame.filename.startswith(_OTHERS)
    ]
    exchanges = any(place in frame.filename for frame in stack for place in _EXCHANGES)
    if not own:
        return _ThreadState("", exchanges, False)
    last = own[-1]
    queues = last.filename.endswith("embedding/training/pipeline.py") and last.name in _QUEUES
    return _ThreadState(f"{_shorten_path(last.filename)}:{last.lineno} {last.name}", exchanges, queues)


def _shorten_path(file: str) -> str:
    """Shorten a path: relative to the package for its own files, else folder and name."""
    if file.startswith(_HERE):
        return str(Path(file).relative_to(_HERE))
    return "/".join(Path(file).parts[-2:])
