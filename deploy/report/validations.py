"""What validation said of each stage: which commit went on, when it stopped, and whether it learned its events by heart.

Validation's nats are of next events alone, without dropout. A training loss is a mean over the events `ahead` too, with dropout,
since the validation before: it lies above what next events cost, so the gap between them is at least what it looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nonet.controller.record import selection_text
from nonet.deploy.report.scores import label, number

ROSE, BELOW = 0.03, 0.15
"""Overfitting: validation costs 3 % more nats than at its lowest, and the training loss lies 15 % below that lowest."""


def validation_sentences(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(sentence, tone) of each validated stage, and one more where it overfits."""
    for stage, found in (report.get("validation") or {}).items():
        history, best = found.get("history") or [], found.get("best")
        if len(history) < 2 or best is None:
            continue
        text = selection_text(label(stage), found)
        yield f"{text[0].upper()}{text[1:]}.", -1 if found.get("start") else 0
        if text := _overfitting(stage, history):
            yield text, -1


def _overfitting(stage: str, history: Sequence[Mapping[str, Any]]) -> str:
    """The sentence, "" where a stage does not overfit."""
    told = [entry for entry in history if entry.get("nats") is not None and entry.get("loss") is not None]
    if len(told) < 2:
        return ""
    lowest, last = min(told, key=lambda entry: entry["nats"]), told[-1]
    nats, loss = lowest["nats"], last["loss"]
    if last["nats"] < (1 + ROSE) * nats or loss > (1 - BELOW) * nats:
        return ""
    name = label(stage)
    return (
        f"{name[0].upper()}{name[1:]} overfits: validation costs {number(last['nats'], 2)} nats an event at step {last['step']}, "
        f"{number(nats, 2)} at step {lowest['step']}, while the training loss fell to {number(loss, 2)}; "
        "more data, dropout or a smaller model may help, more steps will not."
    )
