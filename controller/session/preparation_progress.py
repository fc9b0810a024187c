"""Waits for the tokenise stage and reports its progress; the deadline counts from the last progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from nonet.controller.record import RunFolder
from nonet.deadlines import Deadline
from nonet.workers.runtime import GroupFuture

_LOOK_S, _TELL_S = 0.2, 10.0


def wait_for_tokenise(
    future: GroupFuture, run: RunFolder, deadline: Deadline, report_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the tokenise stage and report its progress.

    Args:
        future: The call of the tokenise stage.
        run: The folder of the run, which has a progress file.
        deadline: The longest time without progress.
        report_progress: Receives a line of progress at most every 10 seconds.

    Returns:
        The result of the tokenise stage.

    Raises:
        DeadlineExceeded: There was no progress within the deadline.
    """
    rows, moved = -1, time.monotonic()
    said = moved
    while not future.done() and time.monotonic() - moved < float(deadline):
        time.sleep(_LOOK_S)
        report = None
        with contextlib.suppress(FileNotFoundError):  # the file is deleted when all rows are done
            report = run.read_json("artifacts/preparing.json")
        if report is None or report["rows"] == rows:
            continue
        rows, moved = report["rows"], time.monotonic()
        if moved - said > _TELL_S:
            said = moved
            report_progress(report["text"])
    return future.get(deadline)
