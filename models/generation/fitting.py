"""Fit of a memory: the weights (l, b, c) with the highest likelihood of held-out events.

The log-likelihood of every point of a grid is summed over the events, and over ranks; then finer grids around the best point are
tried. The same sums give the same weights on every rank. Three parameters do not overfit hundreds of events.
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

# Values of l, b and c in the first grid.
FIT_GRID = (
    (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8),
    (0.0, 0.25, 0.5, 0.75, 1.0),
    (0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
)
_REFINEMENTS = 3  # Number of finer grids.
_MAX_WEIGHTS = (0.98, 1.5, 2.5)  # Upper limits of l, b and c.


@dataclass(frozen=True, slots=True)
class HeldOutVotes:
    """Scores of held-out events, whose items are the targets, for a fit.

    Attributes:
        target: The model's log-probability [U] of each target.
        leaves: The model's log-probabilities [U, V] of the voted leaves.
        votes: Votes [U, V] of transitions for these leaves; 0 for padding.
        place: Index [U] of the target among the voted leaves; -1 if it is not among them.
        nearest: Votes [U, V] of the nearest items for the same leaves.
    """

    target: np.ndarray
    leaves: np.ndarray
    votes: np.ndarray
    place: np.ndarray
    nearest: np.ndarray

    def mix_nearest(self, share: float) -> HeldOutVotes:
        """Return the same events with votes in which the nearest items have weight `share`."""
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
        is_target_UV = (votes.leaf == leaf_U1) & (votes.leaf >= 0)
        place_U = torch.where(is_target_UV.any(1), is_target_UV.int().argmax(1), -1)
        arrays = target_U.double(), leaves_UV.double(), votes.weight.double(), place_U, nearest_UV.double()
        return cls(*(part.cpu().numpy() for part in arrays))

    @classmethod
    def joined(cls, parts: Sequence[HeldOutVotes]) -> HeldOutVotes:
        """Concatenate the events of several parts, padded to the largest number of votes."""
        if not parts:
            empty = np.empty((0, 1))
            return cls(np.empty(0), empty, empty, np.empty(0, np.int64), empty)
        max_votes = max(part.votes.shape[1] for part in parts)

        def pad_leaves(array_UV: np.ndarray) -> np.ndarray:
            return np.pad(array_UV, ((0, 0), (0, max_votes - array_UV.shape[1])))

        return cls(
            np.concatenate([part.target for part in parts]),
            np.concatenate([pad_leaves(part.leaves) for part in parts]),
            np.concatenate([pad_leaves(part.votes) for part in parts]),
            np.concatenate([part.place for part in parts]),
            np.concatenate([pad_leaves(part.nearest) for part in parts]),
        )

    def compute_likelihood(self, candidates: Sequence[Weights]) -> np.ndarray:
        """Compute the log-likelihood [G] of the candidates (l, b, c) in nats, summed over the events."""
        is_voted_UV = self.votes > 0
        has_votes_U, p_U = is_voted_UV.any(1), np.exp(self.target)
        leaf_logp_UV = np.where(is_voted_UV, self.leaves, 0.0)
        log_votes_UV = np.log(np.where(is_voted_UV, self.votes, 1.0)) + np.where(is_voted_UV, 0.0, -1e30)
        vote_probs = {
            (b, c): self._compute_vote_prob(b * leaf_logp_UV + max(c, 1e-9) * log_votes_UV)
            for b, c in dict.fromkeys((b, c) for _, b, c in candidates)
        }
        return np.array(
            [
                np.log(np.where(has_votes_U, (1 - l) * p_U + l * vote_probs[b, c], p_U) + 1e-300).sum()
                for l, b, c in candidates  # noqa: E741
            ]
        )

    def _compute_vote_prob(self, logit_UV: np.ndarray) -> np.ndarray:
        """Compute the softmax of `logit_UV` over the voted leaves, and return its value [U] at each target."""
        q_UV = np.exp(logit_UV - logit_UV.max(1, initial=-1e38)[:, None])
        q_UV /= np.maximum(q_UV.sum(1, keepdims=True), 1e-300)
        return np.where(self.place >= 0, q_UV[np.arange(len(q_UV)), self.place], 0.0)


def fit(likelihood: Callable[[Sequence[Weights]], np.ndarray]) -> Weights:
    """Return the weights (l, b, c) with the highest likelihood; among equals the first ones.

    `likelihood` maps candidates to their log-likelihoods, summed over all ranks.
    """
    axes = [list(axis) for axis in FIT_GRID]
    best: Weights = (0.0, 0.0, 0.0)
    first_steps = (0.08, 0.12, 0.12)
    for n_halvings in range(_REFINEMENTS + 1):
        candidates: list[Weights] = [(l, b, c) for l, b, c in product(*axes)]  # noqa: E741
        best = candidates[int(np.argmax(likelihood(candidates)))]
        steps = [step / 2**n_halvings for step in first_steps]
        axes = [
            [round(min(maximum, max(0.0, value + k * step)), 4) for k in (-1, 0, 1)]
            for value, step, maximum in zip(best, steps, _MAX_WEIGHTS, strict=True)
        ]
    return best
