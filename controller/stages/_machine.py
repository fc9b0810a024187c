"""Machine metrics of a trainer's records: operations, positions, and seconds by part of the steps of a call.

`machine could` is what matrix products would have done in those seconds, so that the shares of stages are ratios of sums.
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
    """Return the machine metrics of the steps of one call, empty if the trainer does not count them."""
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
    """Return a record without the fields that `of_the_machine` uses."""
    return {name: value for name, value in record.items() if name not in _COUNTED}
