"""Scalars for TensorBoard, written without torch and without TensorFlow.

One event file a writer, in the record format of the `tensorboard` package, flushed when asked: a killed run
keeps all that was flushed. A run that resumes opens another file in the same folder and says from which step
on it replaces what was there.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_SESSION_START = 1
_numbers = itertools.count()


class EventWriter:
    """Scalars under tags such as "pretrain/loss"; what is not flushed or closed may be lost.

    `replace_from` hides the folder's events of that step and later ones: give it when a run resumes.
    """

    def __init__(self, folder: Path | str, *, replace_from: int | None = None):
        from tensorboard.summary.writer.record_writer import RecordWriter

        # protobuf makes its classes at run time, where a type checker cannot see them.
        self._event: Any = vars(import_module("tensorboard.compat.proto.event_pb2"))["Event"]
        Path(folder).mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = Path(folder) / name
        self._records = RecordWriter(self.path.open("wb"))
        self._write(wall_time=now, file_version="brain.Event:2")
        if replace_from is not None:
            self._write(wall_time=now, step=replace_from, session_log={"status": _SESSION_START})
        self.flush()

    def scalar(self, tag: str, value: float, step: int, wall_time: float | None = None) -> None:
        """One point of a curve; `wall_time` in unix seconds, now when it is not given."""
        when = time.time() if wall_time is None else wall_time
        point = {"tag": tag, "simple_value": float(value)}
        self._write(wall_time=when, step=step, summary={"value": [point]})

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if not self._records.closed:
            self._records.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(**fields).SerializeToString())
