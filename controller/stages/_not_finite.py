"""Stages whose loss or gradient is no longer finite end at their last complete checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nonet.controller.record import Recorder
from nonet.controller.session import Session
from nonet.errors import DataError

MOST_SKIPPED = 10
"""Steps in a row that may be skipped because their loss or gradient is not finite."""


def ended_early(
    session: Session, recorder: Recorder, name: str, records: Sequence[Mapping[str, float]]
) -> bool:
    """Say which steps were skipped, and end the stage where there were too many in a row.

    Returns:
        Whether the stage has ended; then what goes on is its last complete checkpoint, or an earlier one that it selects.

    Raises:
        DataError: The stage has no checkpoint to end at.
    """
    skipped = sum(record.get("skipped", 0.0) for record in records if "skipped_in_a_row" in record)
    if not skipped:
        return False
    row = max(record.get("skipped_in_a_row", 0.0) for record in records)
    if row < MOST_SKIPPED:
        text = f"{name}: {skipped:.0f} steps were skipped, for their loss or gradient was not finite"
        recorder.event("note", text=text)
        return False
    done = session.end_at_last_checkpoint()
    reason = f"the loss or gradient was not finite in {row:.0f} steps in a row"
    if done is None:
        raise DataError(
            f"stages.{name}: {reason}, and the stage has no checkpoint to end at: its weights are those that it began with; "
            f"lower stages.{name}.lr, or look for values in the data that are no finite numbers"
        )
    recorder.event(
        "note", text=f"{name}: {reason}; the stage ends at its last complete checkpoint, step {done}"
    )
    return True
