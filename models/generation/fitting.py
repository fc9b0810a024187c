"""Fit of a memory: the weights (l, b, c) with the highest likelihood of held-out events.

Log-likelihoods are summed over a grid, so that ranks can add up their sums; then finer grids around the best point are tried.
Three parameters and hundreds of events do not overfit, and the same sums give the same weights on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation.votes import Votes, mix_vote_shares

# Shapes: U prompts, V votes, G candidates (l, b, c).

Weights = tuple[float, float, float]

FIT_GRID = (
    (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8),
    (0.0, 0.25, 0.5, 0.75, 1.0),
    (0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
)
_ROUNDS = 3  # of finer grids
_MOST = (0.98, 1.5, 2.5)


@dataclass(frozen=True, slots=True)
class HeldOutVotes:
    """Scores of held-out events that a fit needs.

    It holds the model's log-probability of each target [U] and of its voted leaves [U, V], the votes [U, V] (0 for none), the
    index of the target among the voted leaves [U] (-1 if absent), and the votes of the nearest items for the same leaves [U, V].
    """

    target: np.ndarray
    leaves: np.ndarray
    votes: np.ndarray
    place: np.ndarray
    nearest: np.ndarray

    def mix_nearest(self, share: float) -> HeldOutVotes:
        """Return the same events with a share of the votes from the nearest items."""
        if not share:
            return self
        votes = mix_vote_shares(torch.from_numpy(self.votes), torch.from_numpy(self.nearest), share)
        return replace(self, votes=votes.numpy())

    @classmethod
    def of(
        cls,
        target_U: Tensor,
        leaves_UV: Tensor,
        votes: Votes,
        leaf_U1: Tensor,
        nearest_UV: Tensor | None = None,
    ) -> HeldOutVotes:
        """Build from the model's log-probabilities of targets and voted leaves, and the leaf of each target."""
        nearest_UV = torch.zeros_like(votes.weight) if nearest_UV is None else nearest_UV
        hit_UV = (votes.leaf == leaf_U1) & (votes.leaf >= 0)
        place_U = torch.where(hit_UV.any(1), hit_UV.int().argmax(1), -1)
        held = target_U.double(), leaves_UV.double(), votes.weight.double(), place_U, nearest_UV.double()
        return cls(*(part.cpu().numpy() for part in held))

    @classmethod
    def joined(cls, parts: Sequence[HeldOutVotes]) -> HeldOutVotes:
        """Concatenate, padded to the width of the widest."""
        if not parts:
            none = np.empty((0, 1))
            return cls(np.empty(0), none, none, np.empty(0, np.int64), none)
        widest = max(part.votes.shape[1] for part in parts)

        def pad_leaves(array_UV: np.ndarray) -> np.ndarray:
            return np.pad(array_UV, ((0, 0), (0, widest - array_UV.shape[1])))

        return cls(
            np.concatenate([part.target for part in parts]),
            np.concatenate([pad_leaves(part.leaves) for part in parts]),
            np.concatenate([pad_leaves(part.votes) for part in parts]),
            np.concatenate([part.place for part in parts]),
            np.concatenate([pad_leaves(part.nearest) for part in parts]),
        )

    def compute_likelihood(self, candidates: Sequence[Weights]) -> np.ndarray:
        """Compute the summed log-likelihood [G] of the candidates, in nats."""
        there = self.votes > 0
        voted, p = there.any(1), np.exp(self.target)
        leaves = np.where(there, self.leaves, 0.0)
        votes = np.log(np.where(there, self.votes, 1.0)) + np.where(there, 0.0, -1e30)
        voted_prob = {
            (b, c): self._compute_vote_share(b * leaves + max(c, 1e-9) * votes)
            for b, c in dict.fromkeys((b, c) for _, b, c in candidates)
        }
        return np.array(
            [
                np.log(np.where(voted, (1 - l) * p + l * voted_prob[b, c], p) + 1e-300).sum()
                for l, b, c in candidates  # noqa: E741
            ]
        )

    def _compute_vote_share(self, power: np.ndarray) -> np.ndarray:
        """Compute q [U] of each target from the log powers of all voted leaves [U, V]."""
        q = np.exp(power - power.max(1, initial=-1e38)[:, None])
        q /= np.maximum(q.sum(1, keepdims=True), 1e-300)
        return np.where(self.place >= 0, q[np.arange(len(q)), self.place], 0.0)


def fit(likelihood: Callable[[Sequence[Weights]], np.ndarray]) -> Weights:
    """Return the candidate with the highest likelihood; ties go to the first.

    `compute_likelihood` maps candidates to their log-likelihoods, summed over all ranks.
    """
    grid = [list(axis) for axis in FIT_GRID]
    best: Weights = (0.0, 0.0, 0.0)
    steps = (0.08, 0.12, 0.12)
    for round_ in range(_ROUNDS + 1):
        candidates: list[Weights] = [(l, b, c) for l, b, c in product(*grid)]  # noqa: E741
        best = candidates[int(np.argmax(likelihood(candidates)))]
        width = [step / 2**round_ for step in steps]
        grid = [
            [round(min(most, max(0.0, at + k * step)), 4) for k in (-1, 0, 1)]
            for at, step, most in zip(best, width, _MOST, strict=True)
        ]
    return best
