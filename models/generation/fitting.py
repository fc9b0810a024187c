"""Fit of a memory: the options of the votes, then the weights (l, b, c), with the highest likelihood of held-out events.

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

from nonet.models.generation.vote_counter import VoteCounter, VoteOptions
from nonet.models.generation.votes import (
    Votes,
    find_hidden,
    make_cooccurrence_counter,
    mix_vote_shares,
)
from nonet.random import rng
from nonet.samples.batches import (
    find_recommendable_events,
    gather_masked_items,
    locate_events,
    locate_prompts,
    split_by_size,
)
from nonet.samples.sequences import VALID, Sequences, Transitions

# Shapes: U prompts, I items, V votes, G candidates (l, b, c), K signals.

Weights = tuple[float, float, float]

# Values of l, b and c in the first grid.
FIT_GRID = (
    (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8),
    (0.0, 0.25, 0.5, 0.75, 1.0),
    (0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
)
_REFINEMENTS = 3  # Number of finer grids.
_MAX_WEIGHTS = (0.98, 1.5, 2.5)  # Upper limits of l, b and c.
# Values of a signal's weight g in the first search.
_SIGNAL_GRID = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNAL_STEPS = (0.5, 0.25, 0.12)  # Steps of the finer searches.
_SIGNAL_ROUNDS = 2  # Number of times that each g, then (l, b, c) is fitted, given the others.
# Candidate decays of the votes of older events, and shares of co-occurring items; the first of each without validation events.
_DECAYS, _SHARES = (1.0, 0.5, 0.7, 1.5, 2.0, 3.0), (0.3, 0.0, 0.1, 0.2)
_UNIFORM = 0.1  # Share of all items alike, with which votes are compared: an event that nobody votes for has a likelihood too.
_MAX_EVENTS, _CHUNK_EVENTS = 2048, 256


@dataclass(frozen=True, slots=True)
class HeldOutVotes:
    """Scores of held-out events, whose items are the targets, for a fit.

    Attributes:
        target: The model's log-probability [U] of each target.
        leaves: The model's log-probabilities [U, V] of the voted leaves.
        votes: Votes [U, V] of transitions for these leaves; 0 for padding.
        place: Index [U] of the target among the voted leaves; -1 if it is not among them.
        nearest: Votes [U, V] of the nearest items for the same leaves.
        similarity: Similarities [U, V, K] of the same leaves' items with the voters; None without signals.
        signal_weights: Weight g of each signal [K] in a likelihood.
    """

    target: np.ndarray
    leaves: np.ndarray
    votes: np.ndarray
    place: np.ndarray
    nearest: np.ndarray
    similarity: np.ndarray | None = None
    signal_weights: tuple[float, ...] = ()

    def weigh_signals(self, signal_weights: Sequence[float]) -> HeldOutVotes:
        """Return the same events with other weights of the signals [K]."""
        return replace(self, signal_weights=tuple(signal_weights))

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
        similarity = None if votes.similarity is None else votes.similarity.double().cpu().numpy()
        return cls(*(part.cpu().numpy() for part in arrays), similarity=similarity)

    @classmethod
    def joined(cls, parts: Sequence[HeldOutVotes]) -> HeldOutVotes:
        """Concatenate the events of several parts, padded to the largest number of votes."""
        if not parts:
            empty = np.empty((0, 1))
            return cls(np.empty(0), empty, empty, np.empty(0, np.int64), empty)
        max_votes = max(part.votes.shape[1] for part in parts)

        def pad_leaves(array: np.ndarray) -> np.ndarray:
            return np.pad(array, ((0, 0), (0, max_votes - array.shape[1]), *[(0, 0)] * (array.ndim - 2)))

        return cls(
            np.concatenate([part.target for part in parts]),
            np.concatenate([pad_leaves(part.leaves) for part in parts]),
            np.concatenate([pad_leaves(part.votes) for part in parts]),
            np.concatenate([part.place for part in parts]),
            np.concatenate([pad_leaves(part.nearest) for part in parts]),
            None
            if parts[0].similarity is None
            else np.concatenate(
                [pad_leaves(part.similarity) for part in parts if part.similarity is not None]
            ),
        )

    def compute_likelihood(self, candidates: Sequence[Weights]) -> np.ndarray:
        """Compute the log-likelihood [G] of the candidates (l, b, c) in nats, summed over the events."""
        is_voted_UV = self.votes > 0
        has_votes_U, p_U = is_voted_UV.any(1), np.exp(self.target)
        leaf_logp_UV = np.where(is_voted_UV, self.leaves, 0.0)
        log_votes_UV = np.log(np.where(is_voted_UV, self.votes, 1.0)) + np.where(is_voted_UV, 0.0, -1e30)
        vote_probs = {
            (b, c): self._compute_vote_prob(self._add_signals(b * leaf_logp_UV + max(c, 1e-9) * log_votes_UV))
            for b, c in dict.fromkeys((b, c) for _, b, c in candidates)
        }
        return np.array(
            [
                np.log(np.where(has_votes_U, (1 - l) * p_U + l * vote_probs[b, c], p_U) + 1e-300).sum()
                for l, b, c in candidates  # noqa: E741
            ]
        )

    def _add_signals(self, logit_UV: np.ndarray) -> np.ndarray:
        """Add the weighted similarities to logits of the voted leaves."""
        if self.similarity is None:
            return logit_UV
        return logit_UV + self.similarity @ np.asarray(self.signal_weights)

    def _compute_vote_prob(self, logit_UV: np.ndarray) -> np.ndarray:
        """Compute the softmax of `logit_UV` over the voted leaves, and return its value [U] at each target."""
        q_UV = np.exp(logit_UV - logit_UV.max(1, initial=-1e38)[:, None])
        q_UV /= np.maximum(q_UV.sum(1, keepdims=True), 1e-300)
        return np.where(self.place >= 0, q_UV[np.arange(len(q_UV)), self.place], 0.0)


def fit(likelihood: Callable[[Sequence[Weights]], np.ndarray]) -> Weights:
    """Return the weights (l, b, c) with the highest likelihood; among equals the first ones.

    `likelihood` maps candidates to their log-likelihoods, summed over all ranks.
    """
    candidates: list[Weights] = [(l, b, c) for l, b, c in product(*FIT_GRID)]  # noqa: E741
    return _refine(likelihood, candidates[int(np.argmax(likelihood(candidates)))])


def _refine(likelihood: Callable[[Sequence[Weights]], np.ndarray], best: Weights) -> Weights:
    """Return the best weights of finer and finer grids around `best`."""
    for n_halvings in range(_REFINEMENTS):
        steps = [step / 2**n_halvings for step in (0.08, 0.12, 0.12)]
        axes = [
            [round(min(maximum, max(0.0, value + k * step)), 4) for k in (-1, 0, 1)]
            for value, step, maximum in zip(best, steps, _MAX_WEIGHTS, strict=True)
        ]
        candidates: list[Weights] = [(l, b, c) for l, b, c in product(*axes)]  # noqa: E741
        best = candidates[int(np.argmax(likelihood(candidates)))]
    return best


def fit_signals(
    likelihood: Callable[[Sequence[Weights], Sequence[float]], np.ndarray], weights: Weights, n_signals: int
) -> tuple[Weights, list[float]]:
    """Return the weights (l, b, c) and the weight g of each signal [K] with the highest likelihood that a search finds.

    Each g is searched with all other weights fixed, then (l, b, c) around their values; a grid would grow with the signals.

    Args:
        likelihood: Maps candidates (l, b, c), and the weight of each signal, to log-likelihoods summed over all ranks.
        weights: The weights (l, b, c) that the search begins with.
        n_signals: Number of signals K.
    """
    signal_weights = [0.0] * n_signals

    def search(k: int, values: Sequence[float]) -> list[float]:
        """Return the weights of the signals with the best of these values for signal k."""
        candidates = [[*signal_weights[:k], value, *signal_weights[k + 1 :]] for value in values]
        return candidates[int(np.argmax([likelihood([weights], candidate)[0] for candidate in candidates]))]

    for _ in range(_SIGNAL_ROUNDS):
        for k in range(n_signals):
            signal_weights[:] = search(k, _SIGNAL_GRID)
            for step in _SIGNAL_STEPS:
                around = [round(max(0.0, signal_weights[k] + n * step), 4) for n in (0, -1, 1)]
                signal_weights[:] = search(k, around)
        weights = _refine(lambda candidates: likelihood(candidates, signal_weights), weights)
    return weights, signal_weights


def choose_votes(
    seq: Sequences, transitions: Transitions, cooccurrence: Transitions | None, last: int, seed: int
) -> dict[str, float]:
    """Choose options of the votes by the likelihood of validation events under the votes alone.

    How fast the votes of older events fall differs between data: in a session the newest event tells most, and in a long history
    many do. The probability of an event is 0.9 of its votes plus 0.1 / I. The defaults, decay 1 and share 0.3, stay unless others
    are more likely by over two standard errors.

    Args:
        seq: The sequences, of whose VALID events at most 2,048 are used, drawn with the seed.
        transitions: Counts of transitions.
        cooccurrence: Counts of co-occurrence; None without this voter.
        last: Number of newest events that vote.
        seed: Seed of the run.

    Returns:
        "decay", and "cooccurrence", the share of co-occurring items, if they vote: options of `VoteOptions`.
    """
    users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
    drawn = np.sort(rng(seed, "votes").permutation(len(users))[:_MAX_EVENTS])
    users, positions = users[drawn], positions[drawn]
    shares = (0.0,) if cooccurrence is None else _SHARES
    logp: dict[tuple[float, float], np.ndarray] = {}  # of each event, by decay and share
    other = None
    if cooccurrence is not None:
        other = _compute_target_votes(
            make_cooccurrence_counter(cooccurrence), len(transitions), seq, users, positions
        )
    for decay in _DECAYS:
        counter = VoteCounter(transitions, VoteOptions(last=last, decay=decay))
        vote_U, has_votes_U = _compute_target_votes(counter, len(transitions), seq, users, positions)
        for share in shares:
            mixed_U = vote_U
            if other is not None:
                # Where one voter has no votes, those of the other count alone.
                weight_2U = np.stack([(1 - share) * has_votes_U, share * other[1]])
                weight_2U /= np.maximum(weight_2U.sum(0), 1e-300)
                mixed_U = weight_2U[0] * vote_U + weight_2U[1] * other[0]
            logp[decay, share] = np.log((1 - _UNIFORM) * mixed_U + _UNIFORM / len(transitions))
    default = next(iter(logp))
    best = max(logp, key=lambda options: logp[options].sum())
    gain_U = logp[best] - logp[default]
    is_certain = gain_U.sum() > 2 * np.sqrt((gain_U**2).sum())
    decay, share = best if is_certain else default
    return {"decay": decay} | ({"cooccurrence": share} if other is not None else {})


def _compute_target_votes(
    counter: VoteCounter, n_items: int, seq: Sequences, users: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of each event's item in its votes [U], without masked items, and whether it has votes [U]."""
    target_U = seq.item[locate_events(seq, users, positions)].astype(np.int64)
    vote_U, total_U = np.zeros((2, len(users)))
    for part in split_by_size(np.ones(len(users), np.int64), _CHUNK_EVENTS):
        prompt, item, vote = counter.count_votes(seq, users[part], positions[part])
        hidden = gather_masked_items(seq, users[part], positions[part])
        vote = np.where(find_hidden(prompt, item, hidden, n_items), 0.0, vote)
        total_U[part] = np.bincount(prompt, weights=vote, minlength=len(hidden))
        is_target = item == target_U[part][prompt]
        vote_U[part] = np.bincount(prompt[is_target], weights=vote[is_target], minlength=len(hidden))
    has_votes_U = total_U > 0
    return vote_U / np.where(has_votes_U, total_U, 1.0), has_votes_U
