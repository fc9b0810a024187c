"""Sentences about the validation of each stage: the selected checkpoint, when the stage stopped, and whether it overfits.

Validation measures the nats of next events only, without dropout. The training loss is a mean since the
previous validation over all `ahead` events, with dropout, so it is higher than the loss of next events alone.
The true gap between the two losses is therefore at least the gap that is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nonet.controller.record import describe_selection
from nonet.deploy.report.scores import format_name, format_number

_MIN_RISE, _MIN_GAP = 0.03, 0.15
"""Overfitting means: validation nats are 3 % above their minimum, and the training loss is 15 % below that minimum."""


def describe_validations(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (sentence, tone) for each validated stage, and another one if the stage overfits."""
    for stage, validation in (report.get("validation") or {}).items():
        history, best = validation.get("history") or [], validation.get("best")
        if len(history) < 2 or best is None:
            continue
        text = describe_selection(format_name(stage), validation)
        yield f"{text[0].upper()}{text[1:]}.", -1 if validation.get("start") else 0
        if text := _describe_overfitting(stage, history):
            yield text, -1


def _describe_overfitting(stage: str, history: Sequence[Mapping[str, Any]]) -> str:
    """Describe the overfitting of a stage by its validations; "" if it does not overfit."""
    complete = [entry for entry in history if entry.get("nats") is not None and entry.get("loss") is not None]
    if len(complete) < 2:
        return ""
    lowest, last = min(complete, key=lambda entry: entry["nats"]), complete[-1]
    lowest_nats, train_loss = lowest["nats"], last["loss"]
    if last["nats"] < (1 + _MIN_RISE) * lowest_nats or train_loss > (1 - _MIN_GAP) * lowest_nats:
        return ""
    name = format_name(stage)
    return (
        f"{name[0].upper()}{name[1:]} overfits: validation is {format_number(last['nats'], 2)} nats per event "
        f"at step {last['step']}, "
        f"{format_number(lowest_nats, 2)} at step {lowest['step']}, "
        f"while the training loss fell to {format_number(train_loss, 2)}; "
        "more data, dropout or a smaller model may help; more steps will not."
    )
