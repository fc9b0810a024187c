"""What a worker is doing, read off its threads: for whoever waited too long for it.

Its work thread is where the call is; a pipeline's work thread waits for its helpers (`sparse-...`), so of these the one that
is not itself in an exchange tells more. Files of Python, of installed packages and of Ray are not its own.
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
    """who: the worker's name; call: role.method it is in, "" when idle; for_s: since when, in seconds

    at       innermost frame of its own: "file.py:12 function"
    waits    it is in a collective or an exchange: for other ranks
    silent   it does not even answer this
    stacks   of all its threads
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
    at: str
    exchanges: bool
    queues: bool


def describe_activity(worker_name: str, call: str, elapsed_s: float, thread_id: int) -> WorkerActivity:
    """What the thread `work` of this process is doing, which a call keeps busy."""
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
    if own.queues:  # behind a helper: one that works, else one that waits for other ranks
        busy = [thread for thread in seen[1:] if thread.at]  # the thread of saves rests in Python's own code
        own = min(busy, key=lambda thread: (thread.queues, thread.exchanges), default=own)
    return WorkerActivity(worker_name, call, elapsed_s, own.at, own.exchanges, stacks=dump_stacks())


def is_peer_timeout(error: BaseException) -> bool:
    """Whether an exchange or a collective gave up on other ranks: they are late, not the one that raises."""
    frames = traceback.extract_tb(error.__traceback__)
    exchanges = any(place in frame.filename for frame in frames for place in _EXCHANGES)
    return exchanges and bool(_GAVE_UP.search(str(error)))


def dump_stacks() -> str:
    """Stacks of all threads of this process, innermost frame first."""
    with tempfile.TemporaryFile() as out:
        faulthandler.dump_traceback(out, all_threads=True)
        out.seek(0)
        return out.read().decode()


def _summarise_stack(stack: traceback.StackSummary) -> _ThreadState:
    """The stack's innermost own frame, and whether it is in an exchange or at a pipeline's queue."""
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
    """A file of the package from there, any other by its name and folder."""
    if file.startswith(_HERE):
        return str(Path(file).relative_to(_HERE))
    return "/".join(Path(file).parts[-2:])
