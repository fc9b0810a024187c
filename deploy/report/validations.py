"""What validation says about each stage: the selected checkpoint, when the stage stopped, and whether it overfits.

The nats of validation are of next events only, without dropout. The training loss is a mean since the
previous validation over all `ahead` events, with dropout, so it is higher than the loss of next events. The
true gap between both is therefore at least the gap that is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nonet.controller.record import describe_selection
from nonet.deploy.report.scores import format_name, format_number

ROSE, BELOW = 0.03, 0.15
"""Overfitting means: validation nats are 3 % above their minimum, and the training loss is 15 % below that minimum."""


def describe_validations(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (sentence, tone) for each validated stage, and another one if the stage overfits."""
    for stage, found in (report.get("validation") or {}).items():
        history, best = found.get("history") or [], found.get("best")
        if len(history) < 2 or best is None:
            continue
        text = describe_selection(format_name(stage), found)
        yield f"{text[0].upper()}{text[1:]}.", -1 if found.get("start") else 0
        if text := _describe_overfitting(stage, history):
            yield text, -1


def _describe_overfitting(stage: str, history: Sequence[Mapping[str, Any]]) -> str:
    """Describe the overfitting of a stage; "" if it does not overfit."""
    told = [entry for entry in history if entry.get("nats") is not None and entry.get("loss") is not None]
    if len(told) < 2:
        return ""
    lowest, last = min(told, key=lambda entry: entry["nats"]), told[-1]
    nats, loss = lowest["nats"], last["loss"]
    if last["nats"] < (1 + ROSE) * nats or loss > (1 - BELOW) * nats:
        return ""
    name = format_name(stage)
    return (
        f"{name[0].upper()}{name[1:]} overfits: validation is {format_number(last['nats'], 2)} nats per event "
        f"at step {last['step']}, "
        f"{format_number(nats, 2)} at step {lowest['step']}, while the training loss fell to {format_number(loss, 2)}; "
        "more data, dropout or a smaller model may help; more steps will not."
    )
