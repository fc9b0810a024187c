"""What a trainer's records say of the machine, as metrics: operations, positions, and seconds by part of a call's steps.

`machine could` is what matrix products would have done in those seconds, so that shares of stages are sums over sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Parts of a step by the name in a record, and what they are called.
PARTS = {
    "waited": "data wait",
    "sparse": "sparse",
    "dense": "dense",
    "communication": "communication",
    "optimizer": "optimizer",
}
_COUNTED = ("flops", "positions", "peak", *PARTS)


def of_the_machine(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the steps of one call; none where the trainer does not count."""
    if not all("flops" in record for record in records):
        return {}

    def total(name: str) -> float:
        return sum(record.get(name, 0.0) for record in records)

    could = sum(record["peak"] * record["seconds"] for record in records)
    sums = {
        "flops": total("flops"),
        "positions": total("positions"),
        "seconds": total("seconds"),
        "could": could,
    }
    parts = {title: total(name) for name, title in PARTS.items()}
    return {f"machine {name}": value for name, value in (sums | parts).items()}


def without_machine(record: Mapping[str, float]) -> dict[str, float]:
    """A record without what `of_the_machine` tells."""
    return {name: value for name, value in record.items() if name not in _COUNTED}
