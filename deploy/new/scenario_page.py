"""The scenario and the reward file that `nonet new FILE --data DIR` writes: short, commented and ready to run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nonet.controller.scenario.settings import MANY_IMMEDIATE
from nonet.samples.profiles import DataProfile
from nonet.samples.sequences import COUNT, KINDS, SPAN

_MIN_LIKED_SHARE = 0.45  # of the rated events, that count as liked
_PURCHASE_KINDS = ("order", "purchase", "buy", "transaction", "pay")  # of events, by their names


def render_scenario(name: str, title: str, data: Mapping[str, Any], profile: DataProfile, reward: str) -> str:
    """Render the scenario as YAML.

    Args:
        name: The scenario's name.
        title: The title in the first comment.
        data: The `data` section: `interactions`, `items`, `columns`.
        profile: Figures of the data.
        reward: The file of the first reward, relative to the scenario.
    """
    return "\n".join(_iterate_lines(name, title, data, profile, reward)) + "\n"


def _iterate_lines(
    name: str, title: str, data: Mapping[str, Any], profile: DataProfile, reward: str
) -> Iterator[str]:
    """Yield the lines of `render_scenario`."""
    counts = f"{profile.users:,} users, {profile.items:,} items, {profile.events:,} events"
    yield f"# {title}: {counts} -> recommender."
    yield f"name: {name}"
    yield "seed: 7"
    yield "settings: data       # keys left out are derived from the data (see `nonet plan`); keys given here take precedence"
    yield "data:"
    for key, value in data.items():
        yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    yield "stages:"
    yield "  pretrain: {}       # predict the next events of all users"
    if threshold := find_liked_threshold(profile):
        yield f'  finetune: {{target: "rating >= {threshold:g}"}}   # then the events that they liked'
    elif kinds := [kind for kind in profile.kinds if kind.lower() in _PURCHASE_KINDS]:
        yield f'  # finetune: {{target: "event in ({", ".join(map(repr, kinds))},)"}}   # then the events that they bought'
    yield "  # rl:                # then your own rewards: remove the # characters and edit the file"
    yield "  #   steps: 60"
    yield "  #   users: 64"
    yield "  #   lr: 1e-3          # higher: more reward and less ranking; of the steps that keep 98 % of it, the best is kept"
    yield "  #   algorithm: {use: rsft, better: 1.0}   # a policy gradient, plus the next events of all prompts"
    yield "  #   rollout: {use: beam, width: 16}"
    yield "  #   rewards:"
    yield "  #     hit: {weight: 1.0}"
    yield f"  #     {name}: {{use: {reward}, weight: 0.2}}"


def render_reward(name: str) -> str:
    """Render the Python file of a first reward."""
    return f'''"""A reward of your own: numbers [U, W] for U users and W recommended items each.

It may use any column of the items, and more: docs/reference/rewards.md.
"""

import nonet


@nonet.reward
def {name}(events, *, half_life: float = 30.0):  # events [U, W]: training events of each recommended item
    return 0.5 ** (events / half_life)  # 1 for an item without events, halved every `half_life` events
'''


def choose_compression(profile: DataProfile, columns: Collection[str]) -> dict[str, str] | None:
    """Return `data.events` for logs in which events of several kinds and one item follow each other; None for others.

    In a shop's log, a view, a cart and an order of one item are one interest: without it, every model that begins its lists with
    the newest item is right almost always, and nothing is learned about the next other item. A log that has a column of the
    names that compression adds is left as it is.

    Args:
        profile: Figures of the data.
        columns: Names of the columns of the log.
    """
    is_taken = any(name in columns for name in (COUNT, SPAN, KINDS))
    if len(profile.kinds) < 2 or profile.immediate < MANY_IMMEDIATE or is_taken:
        return None
    return {"compress": "1d"}


def find_liked_threshold(profile: DataProfile) -> float | None:
    """Return the highest rating that at least 45 % of the rated events reach.

    The result is None if that is the lowest rating, which all events reach, or if there are no ratings.
    """
    ratings = sorted(profile.ratings, reverse=True)
    if len(ratings) < 2:
        return None
    total, reached = sum(profile.ratings.values()), 0
    for rating in ratings[:-1]:
        reached += profile.ratings[rating]
        if reached >= _MIN_LIKED_SHARE * total:
            return rating
    return None
