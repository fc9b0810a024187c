"""The scenario and the reward file that `nonet new FILE --data DIR` writes: short, commented and ready to run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nonet.samples.profiles import DataProfile

_LIKED = 0.45  # least share of the events that count as liked
_BOUGHT = ("order", "purchase", "buy", "transaction", "pay")


def render_scenario(name: str, title: str, data: Mapping[str, Any], profile: DataProfile, reward: str) -> str:
    """Render the scenario as YAML.

    Args:
        name: The scenario's name.
        title: The title of its first comment.
        data: The `data` section: `interactions`, `items`, `columns`.
        profile: Figures of the data.
        reward: The file of the first reward, relative to the scenario.
    """
    return "\n".join(_iterate_lines(name, title, data, profile, reward)) + "\n"


def _iterate_lines(
    name: str, title: str, data: Mapping[str, Any], profile: DataProfile, reward: str
) -> Iterator[str]:
    """Yield the lines of the scenario."""
    p = profile
    yield f"# {title}: {p.users:,} users, {p.items:,} items, {p.events:,} events -> recommender."
    yield f"name: {name}"
    yield "seed: 7"
    yield "settings: data       # keys left out are derived from the data (see `nonet plan`); keys given here take precedence"
    yield "data:"
    for key, value in data.items():
        yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    yield "stages:"
    yield "  pretrain: {}       # predict the next events of all users"
    if threshold := find_liked_threshold(p):
        yield f'  finetune: {{target: "rating >= {threshold:g}"}}   # then the events that they liked'
    elif bought := [kind for kind in p.kinds if kind.lower() in _BOUGHT]:
        yield f'  # finetune: {{target: "event in ({", ".join(map(repr, bought))},)"}}   # then the events that they bought'
    yield "  # rl:                # then your own rewards: remove the # characters and edit the file"
    yield "  #   steps: 60"
    yield "  #   users: 64"
    yield "  #   lr: 1e-4"
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


def find_liked_threshold(profile: DataProfile) -> float | None:
    """Return the highest rating such that at least 45 % of the rated events are rated so or higher.

    None if all ratings are equal or there are none.
    """
    values = sorted(profile.ratings, reverse=True)
    if len(values) < 2:
        return None
    total, above = sum(profile.ratings.values()), 0
    for value in values[:-1]:
        above += profile.ratings[value]
        if above >= _LIKED * total:
            return value
    return None
