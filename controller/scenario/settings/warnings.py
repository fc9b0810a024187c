"""What is dangerous in a data set, in sentences with numbers: for plans, runs and `nonet new`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.scenario.settings.rule import USER_ROW_EVENTS, held_out_of
from nonet.samples.profiles import Profile

TIED = 0.05  # share of neighbours, or of tested users, from which ties are told
UNTESTED = 0.5  # share of users that only train
FEW_TESTED = 200  # users; under them a recall of 0.1 is uncertain by more than 0.02
TWICE, NEW = 0.01, 0.3


def data_warnings(profile: Profile, split: Mapping[str, Any], features: Mapping[str, Any]) -> Iterator[str]:
    """Sentences. profile: of the kept events; split: the scenario's; features: sparse features with a row."""
    p, held_out = profile, held_out_of(split)
    last_out = split.get("use", "leave_last_out") == "leave_last_out"
    if p.ties > TIED and not p.counted:
        yield (
            f"{p.ties:.0%} of neighbouring events of a user share a timestamp: their order is that of the rows in the file"
        )
    if last_out and held_out:
        yield from _of_the_end(p, int(split.get("test", 1)), held_out)
    median = p.trained_length(held_out)
    if "user" in features and median < USER_ROW_EVENTS:
        yield (
            f"sparse.tables: a row a user, and the median user has {median} training events: under {USER_ROW_EVENTS} such rows "
            "learn users by heart; leave `user` out"
        )
    if p.duplicates > TWICE * p.events:
        yield f"{p.duplicates:,} of {p.events:,} events are there twice (same user, item and second)"
    if p.drift is not None and p.drift > NEW:
        yield f"{p.drift:.0%} of the newest tenth of the events are of items not seen before: no model knows those"


def _of_the_end(p: Profile, test: int, held_out: int) -> Iterator[str]:
    tied, users = p.tied_tests(test, held_out)
    if not p.counted and users and tied > TIED * users:
        yield (
            f"{tied / users:.0%} of the tested users ({tied:,} of {users:,}) have a test event at the second of the event before "
            "it, so what is tested may be known from what is trained: `use: time` cuts between seconds"
        )
    tested = p.users_above(held_out)
    if tested < (1 - UNTESTED) * p.users:
        yield (
            f"{p.users - tested:,} of {p.users:,} users have under {held_out + 1} events: they are trained on and not tested"
        )
    if tested < FEW_TESTED:
        yield f"{tested:,} users are tested: differences of a few hundredths are noise"
