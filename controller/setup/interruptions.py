"""Interruptions of a run, RUN/interruptions.json: when it was resumed, and which lost workers it replaced.

Only a run that was interrupted has the file. It is a list of objects with `time` (unix seconds at which the run continued), `why`
("resumed", or what was lost), and, if it was resumed, `seconds` (how long the run had worked since it was started or resumed).
"""

from __future__ import annotations

import time
from typing import Any

from nonet.controller.record import RunFolder
from nonet.storage import remove

_FILE = "interruptions.json"


def read_interruptions(run: RunFolder) -> list[dict[str, Any]]:
    """Return the interruptions of a run, oldest first."""
    return run.read_json(_FILE) or []


def record_resume(run: RunFolder) -> None:
    """Record that a run is about to be resumed; the files that it wrote last show until when it worked."""
    interruptions = read_interruptions(run)
    resumed_at = [interruption["time"] for interruption in interruptions if "seconds" in interruption]
    started_at = max([run.scenario.stat().st_mtime, *resumed_at])
    written = [run.metrics, run.journal, run.trace, run.path / "outcome.json", *run.results.glob("*.json")]
    stopped_at = max((path.stat().st_mtime for path in written if path.exists()), default=started_at)
    seconds = round(max(0.0, stopped_at - started_at), 3)
    run.write_json(_FILE, [*interruptions, {"time": time.time(), "why": "resumed", "seconds": seconds}])


def record_loss(run: RunFolder, why: str) -> None:
    """Record that a run continues after it has lost a worker or its controller."""
    run.write_json(_FILE, [*read_interruptions(run), {"time": time.time(), "why": why}])


def clear_interruptions(run: RunFolder) -> None:
    """Delete the record, as a run without a checkpoint starts again."""
    remove(run.path / _FILE, "the run starts again")
