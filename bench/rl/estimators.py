"""Estimators of a policy gradient as coefficients: the weight of each item's score function in a group.

Groups are drawn item by item from the exact distribution; tests check that the shipped rollouts have its law. The
advantages are those of the shipped algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

# Shapes: U prompts, R repetitions, G = U * R groups, W beams, I items.


@dataclass(frozen=True)
class Estimator:
    """An algorithm over groups that are drawn in one way.

    Attributes:
        title: Title of the row.
        algorithm: Name of the algorithm.
        group: Maps (chance_GI, width, draw) to items, weights and inclusion probabilities.
    """

    title: str
    algorithm: str
    group: Callable[..., tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]


def take_top(chance_GI: np.ndarray, width: int, draw: np.random.Generator) -> tuple[np.ndarray, None, None]:
    """Take the most likely items as if they were draws, as other systems do."""
    return np.argsort(-chance_GI, axis=1)[:, :width], None, None


def draw_independent(
    chance_GI: np.ndarray, width: int, draw: np.random.Generator
) -> tuple[np.ndarray, None, None]:
    """Draw with replacement."""
    total_GI = chance_GI.cumsum(1)
    mark_GW = draw.random((len(chance_GI), width)) * total_GI[:, -1:]
    return (total_GI[:, None, :] <= mark_GW[:, :, None]).sum(-1), None, None


def draw_gumbel(
    chance_GI: np.ndarray, width: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw without replacement, and return items, weights and inclusion probabilities."""
    with np.errstate(divide="ignore"):
        logp_GI = np.log(chance_GI)
    noisy_GI = logp_GI - np.log(-np.log(draw.random(chance_GI.shape)))
    order = np.argpartition(-noisy_GI, width, axis=1)[:, : width + 1]
    noisy = np.take_along_axis(noisy_GI, order, 1)
    order = np.take_along_axis(order, np.argsort(-noisy, axis=1), 1)
    bound = np.take_along_axis(noisy_GI, order[:, width:], 1)
    item = order[:, :width]
    logp = np.take_along_axis(logp_GI, item, 1)
    included = -np.expm1(-np.exp(logp - bound))
    return item, np.exp(logp) / included, included


def draw_tailed(
    chance_GI: np.ndarray, width: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take the most likely items, and for a quarter of the group independent draws from the others."""
    tail = max(2, width // 4)
    sure = np.argsort(-chance_GI, axis=1)[:, : width - tail]
    left_GI = chance_GI.copy()
    np.put_along_axis(left_GI, sure, 0.0, 1)
    drawn, _, _ = draw_independent(left_GI, tail, draw)
    weight = np.take_along_axis(chance_GI, sure, 1)
    rest = np.repeat((1 - weight.sum(1, keepdims=True)) / tail, tail, 1)
    known = np.concatenate([np.ones_like(weight), np.zeros_like(rest)], 1)
    return np.concatenate([sure, drawn], 1), np.concatenate([weight, rest], 1), known


ESTIMATORS = (
    Estimator("GRPO, top W (as peers)", "grpo", take_top),
    Estimator("GRPO, draws", "grpo", draw_independent),
    Estimator("Dr. GRPO, draws", "dr_grpo", draw_independent),
    Estimator("REINFORCE++, draws", "reinforce_pp", draw_independent),
    Estimator("RLOO, draws", "rloo", draw_independent),
    Estimator("GRPO, Gumbel top-W", "grpo", draw_gumbel),
    Estimator("RLOO, Gumbel top-W", "rloo", draw_gumbel),
    Estimator("RLOO, beam + tail", "rloo", draw_tailed),
)


def compute_coefficients(
    estimator: Estimator, chance_UI: np.ndarray, reward_UI: np.ndarray, width: int, times: int, seed: int
) -> np.ndarray:
    """Return the weight [U, I] of every item's score function, the mean over `times` groups of each prompt."""
    from nonet.plugins import load_heavy
    from nonet.rl import Draws
    from nonet.rl.algorithms import ALGORITHMS

    spec = ALGORITHMS.get(estimator.algorithm)
    users, items = chance_UI.shape
    chance_GI = np.repeat(chance_UI, times, 0)
    item_GW, weight, known = estimator.group(chance_GI, width, np.random.default_rng(seed))
    reward_GW = np.take_along_axis(np.repeat(reward_UI, times, 0), item_GW, 1)
    drawn = {}
    if weight is not None and known is not None:
        drawn = {"draws": Draws(torch.from_numpy(weight), torch.from_numpy(known))}
    valid = torch.ones(item_GW.shape, dtype=torch.bool)
    options = spec.options().model_dump()
    found = load_heavy(spec.advantage)(
        {"reward": torch.from_numpy(reward_GW)}, {"reward": 1.0}, valid, options, lambda sums: sums, **drawn
    )
    place = np.repeat(np.arange(users), times)[:, None] * items + item_GW
    value = found.value.double().numpy() / width / times
    return np.bincount(place.ravel(), value.ravel(), users * items).reshape(users, items)
