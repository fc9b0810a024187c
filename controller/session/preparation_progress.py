"""Waiting for the tokenise stage: how far it is, told meanwhile; its deadline counts from the last rows that it got done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from nonet.controller.record import RunFolder
from nonet.deadlines import Deadline
from nonet.workers.runtime import GroupFuture

_LOOK_S, _TELL_S = 0.2, 10.0


def told_of_rows(
    future: GroupFuture, run: RunFolder, deadline: Deadline, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The answer of the tokenise stage. Raises DeadlineExceeded when it got nothing done for as long as the deadline."""
    rows, moved = -1, time.monotonic()
    said = moved
    while not future.done() and time.monotonic() - moved < float(deadline):
        time.sleep(_LOOK_S)
        report = None
        with contextlib.suppress(FileNotFoundError):  # it goes when the rows are done
            report = run.read_json("artifacts/preparing.json")
        if report is None or report["rows"] == rows:
            continue
        rows, moved = report["rows"], time.monotonic()
        if moved - said > _TELL_S:
            said = moved
            tell(report["text"])
    return future.get(deadline)
