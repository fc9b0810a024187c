"""StepReport: the results of the newest steps of a stage, and the functions that record them.

`record_report` records, in this order, the counts of the sparse tables, the metrics of the machine, the displayed metrics, a
checkpoint if one is due, and the validations that the evaluator has finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nonet.controller.groups import RewardScores
from nonet.controller.record import Recorder, describe_selection
from nonet.controller.scenario import has_policy
from nonet.controller.session import Session
from nonet.controller.stages._policy_scores import score_held_out, score_validation
from nonet.errors import DataError

# The timed sections of a step: from their name in a trainer's record to the name of their metric.
PARTS = {
    "waited": "data wait",
    "sparse": "sparse",
    "dense": "dense",
    "communication": "communication",
    "optimizer": "optimizer",
}
# The entries of a trainer's record that `compute_machine_metrics` turns into metrics of their own.
_MACHINE_ENTRIES = ("flops", "positions", "peak", *PARTS)

_MAX_SKIPPED_IN_A_ROW = 10  # so many consecutive steps whose loss or gradient is not finite end the stage

Stopped = Callable[[], bool]
"""A function that returns whether the user has requested that the run stop."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of the newest steps of a stage.

    Attributes:
        first: Number of the first of these steps in the stage.
        done: Number of steps of the stage that are done, including these.
        records: One record per step, as the trainers returned it.
        shown: Metrics that are recorded and shown.
        further: Metrics of the trainers that are recorded but not shown.
        absent: Number of positions for which the rollouts read the default row; None if no rollout took part.
        probe: Computes metrics of held-out users; called after `further` and `absent` are recorded.
    """

    first: int
    done: int
    records: Sequence[Mapping[str, float]]
    shown: Mapping[str, float]
    further: Mapping[str, float]
    absent: int | None = None
    probe: Callable[[], Mapping[str, float]] = dict


def report_policy_step(
    session: Session,
    stage: str,
    step: int,
    record: Mapping[str, float],
    seconds: float,
    *,
    more: Mapping[str, float],
) -> StepReport:
    """Return the report of one RL step, whose probe scores the lists that held-out users would be served after the step.

    Args:
        session: The session.
        stage: The RL stage.
        step: Number of the step in the stage.
        record: Record of the update.
        seconds: Wall-clock time of the step.
        more: Further metrics to show.
    """
    done = step + 1
    shown = _add_pool_to_names(session, drop_machine_entries(record)) | {
        "rows/s": record["prompts"] / seconds
    }
    return StepReport(
        first=step,
        done=done,
        records=[record],
        shown=shown | dict(more),
        further=compute_machine_metrics([record]),
        absent=session.rollout.absent,
        probe=lambda: score_held_out(session, stage, done) | score_validation(session, stage, done),
    )


def record_report(
    session: Session, recorder: Recorder, stage: str, report: StepReport, stopped: Stopped | None = None
) -> Literal["running", "stopped", "ended"]:
    """Record the newest steps of a stage, and write a checkpoint if one is due.

    Args:
        session: The session.
        recorder: Takes metrics and notes.
        stage: The stage.
        report: The newest steps.
        stopped: A function that returns whether the user has requested a stop, in which case a checkpoint is written at once.
            By default, no stop is requested.

    Returns:
        "stopped" if the user has requested a stop before the end of the stage; "ended" if too many steps were skipped, which
        ends the stage early; else "running".
    """
    done, steps = report.done, session.stages[stage].steps
    shown = dict(report.shown) | _record_tables(session, recorder, stage, done)
    recorder.record_metrics(stage, done, report.further)
    if report.absent is not None:
        recorder.record_metrics(stage, done, {"absent": float(report.absent)}, role="rollout")
    shown |= report.probe()
    recorder.record_step(stage, done, shown)
    for step in range(report.first, done):
        session.commit(step)  # writes a checkpoint if one is due after the step
    must_stop = stopped is not None and done < steps and stopped()
    if must_stop:
        session.save_applied_steps()
    if _end_if_diverged(session, recorder, stage, report.records):
        return "ended"
    _record_finished_validations(session, recorder, stage, done)
    return "stopped" if must_stop else "running"


def finish_stage(session: Session, recorder: Recorder, stage: str, step: int) -> None:
    """End a stage after `step` steps, and record which of its checkpoints was selected.

    Usually, writing its last checkpoint has already ended the stage, and ending it again has no effect. If the run was killed
    between the two, the stage is ended here.
    """
    session.end(step)
    _record_finished_validations(session, recorder, stage, step, over=True)


def note_quarantined(
    session: Session, recorder: Recorder, stage: str, step: int, scores: RewardScores
) -> None:
    """Record the prompts of a step that a reward could not score: in the journal, as metrics, and in a note.

    Args:
        session: The session.
        recorder: Takes metrics and notes.
        stage: The RL stage.
        step: The step that the scores belong to.
        scores: The scores that `RewardHandles.score` returned.
    """
    counts = {f"quarantined.{lost.reward}": float(len(lost.uids)) for lost in scores.quarantined}
    if scores.retried:
        recorder.record_metrics(
            stage, step + 1, counts | {"asked again": float(scores.retried)}, role="reward"
        )
    for lost in scores.quarantined:
        session.checkpoint_log.write_record(
            quarantined=lost.reward, stage=stage, step=step, uids=lost.uids, users=lost.users, why=lost.why
        )
        recorder.add_event("note", text=f"step {step} of {stage}: {lost.describe()}")


def compute_machine_metrics(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return FLOPs, positions and seconds of the steps of one call, as metrics.

    The metric "machine could" is the number of FLOPs that the device would have computed in the same time at its peak rate for
    matrix products. All metrics are sums, so that the utilization of a stage is the sum of `machine flops` divided by the sum of
    `machine could`.

    Args:
        records: One record per step.

    Returns:
        The metrics; none where the trainer does not count FLOPs.
    """
    if not all("flops" in record for record in records):
        return {}

    def sum_entries(name: str) -> float:
        return sum(record.get(name, 0.0) for record in records)

    peak_flops = sum(record["peak"] * record["seconds"] for record in records)  # "peak" is in FLOP/s
    sums = {
        "flops": sum_entries("flops"),
        "positions": sum_entries("positions"),
        "seconds": sum_entries("seconds"),
        "could": peak_flops,
    }
    section_seconds = {title: sum_entries(name) for name, title in PARTS.items()}
    return {f"machine {name}": value for name, value in (sums | section_seconds).items()}


def drop_machine_entries(record: Mapping[str, float]) -> dict[str, float]:
    """Return a record without the entries that `compute_machine_metrics` turns into metrics."""
    return {name: value for name, value in record.items() if name not in _MACHINE_ENTRIES}


def _record_tables(session: Session, recorder: Recorder, stage: str, done: int) -> dict[str, float]:
    """Record the counts of the sparse tables, and return those to show, by name; none if no table refuses or evicts rows."""
    counts = session.trainer.pop_table_counts()
    recorder.record_tables(stage, done, counts)
    if not has_policy(session.scenario):
        return {}
    names = ("rows", "refused", "evicted")
    return {f"sparse {name}": float(sum(count[name] for count in counts.values())) for name in names}


def _record_finished_validations(
    session: Session, recorder: Recorder, stage: str, step: int, *, over: bool = False
) -> None:
    """Record the validations that have finished and, if the stage is `over`, which of its checkpoints was selected."""
    validation = session.validation
    if validation is None:
        return
    for entry in validation.pop_news():
        metrics = {
            f"validation {name}": value
            for name, value in (*entry["metrics"].items(), ("nats", entry["nats"]))
        }
        defined = {name: value for name, value in metrics.items() if value is not None}
        recorder.record_metrics(stage, entry["step"], defined, role="evaluator")
        metric, value = validation.rule.metric, validation.get_value(entry)
        shown = {} if math.isnan(value) else {f"valid {metric}": value}
        recorder.add_event("step", stage=stage, step=step, metrics=shown)
    if over and (end := validation.record.end):
        text = describe_selection(stage, {**end, "history": validation.record.history})
        recorder.add_event("note", text=text)


def _end_if_diverged(
    session: Session, recorder: Recorder, name: str, records: Sequence[Mapping[str, float]]
) -> bool:
    """Record how many steps were skipped, and end the stage if too many consecutive ones were.

    Returns:
        Whether the stage has ended; it then ends with its last complete checkpoint, or with an earlier one that is selected.

    Raises:
        DataError: The stage has no checkpoint to end at.
    """
    skipped_count = sum(record.get("skipped", 0.0) for record in records if "skipped_in_a_row" in record)
    if not skipped_count:
        return False
    longest_run = max(record.get("skipped_in_a_row", 0.0) for record in records)
    if longest_run < _MAX_SKIPPED_IN_A_ROW:
        text = f"{name}: {skipped_count:.0f} steps were skipped because their loss or gradient was not finite"
        recorder.add_event("note", text=text)
        return False
    done = session.end_at_last_checkpoint()
    reason = f"the loss or gradient was not finite in {longest_run:.0f} steps in a row"
    if done is None:
        raise DataError(
            f"stages.{name}: {reason}, and the stage has no checkpoint to end at: its weights are those that it began with; "
            f"lower stages.{name}.lr, or look for values in the data that are not finite numbers"
        )
    recorder.add_event(
        "note", text=f"{name}: {reason}; the stage ends at its last complete checkpoint, step {done}"
    )
    return True


def _add_pool_to_names(session: Session, record: Mapping[str, float]) -> dict[str, float]:
    """Return a step's record with the pool of the rollout appended to the names of the mismatch metrics."""
    if not any(name.startswith("mismatch/") for name in record):
        return dict(record)
    pool = next(group.pool for group in session.plan.groups if "rollout" in group.roles)
    return {
        f"{name}.{pool}" if name.startswith("mismatch/") else name: value for name, value in record.items()
    }
