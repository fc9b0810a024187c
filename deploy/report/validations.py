"""What validation says about each stage: the selected checkpoint, when the stage stopped, and whether it overfits.

The nats of validation are of next events only, without dropout. The training loss is a mean since the
previous validation over all `ahead` events, with dropout, so it is higher than the loss of next events. The
true gap between both is therefore at least the gap that is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nonet.controller.record import selection_text
from nonet.deploy.report.scores import label, number

ROSE, BELOW = 0.03, 0.15
"""Overfitting means: validation nats are 3 % above their minimum, and the training loss is 15 % below that minimum."""


def validation_sentences(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (sentence, tone) for each validated stage, and another one if the stage overfits."""
    for stage, found in (report.get("validation") or {}).items():
        history, best = found.get("history") or [], found.get("best")
        if len(history) < 2 or best is None:
            continue
        text = selection_text(label(stage), found)
        yield f"{text[0].upper()}{text[1:]}.", -1 if found.get("start") else 0
        if text := _overfitting(stage, history):
            yield text, -1


def _overfitting(stage: str, history: Sequence[Mapping[str, Any]]) -> str:
    """Describe the overfitting of a stage; "" if it does not overfit."""
    told = [entry for entry in history if entry.get("nats") is not None and entry.get("loss") is not None]
    if len(told) < 2:
        return ""
    lowest, last = min(told, key=lambda entry: entry["nats"]), told[-1]
    nats, loss = lowest["nats"], last["loss"]
    if last["nats"] < (1 + ROSE) * nats or loss > (1 - BELOW) * nats:
        return ""
    name = label(stage)
    return (
        f"{name[0].upper()}{name[1:]} overfits: validation is {number(last['nats'], 2)} nats per event at step {last['step']}, "
        f"{number(nats, 2)} at step {lowest['step']}, while the training loss fell to {number(loss, 2)}; "
        "more data, dropout or a smaller model may help; more steps will not."
    )
