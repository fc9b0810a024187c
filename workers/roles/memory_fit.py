"""MemoryFit: fits the weights of a memory to validation events; every rank computes a share of the likelihood.

At most 2,048 events are used, drawn with the run's seed. The model runs in evaluation mode, and its parameters are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nonet.models.generation import (
    MEMORY_WEIGHTS,
    Corpus,
    HeldOutVotes,
    Voters,
    compute_similarity_weights,
    fit,
    fit_signals,
    get_signal_weights,
    move_batch,
    remember,
    set_signal_weights,
)
from nonet.random import rng
from nonet.samples.batches import (
    find_recommendable_events,
    locate_events,
    locate_prompts,
    make_prompt_batch,
    split_by_size,
)
from nonet.samples.sequences import VALID
from nonet.workers import StepShare
from nonet.workers.engines.division import join_passes
from nonet.workers.roles.learner import TensorGroupTables
from nonet.workers.roles.settings import RunSetup
from nonet.workers.runtime import Membership, split_evenly

# Shapes: U prompts, V votes.

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)  # Candidate shares of the nearest items in the votes.
_MAX_EVENTS = 2048
_CHUNK_EVENTS = 256  # Events per forward pass.


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Fits the weights of a memory on one rank, together with all other ranks.

    Attributes:
        run: Settings of the run.
        corpus: Sequences, items and semantic ids.
        model: A model with a memory.
        tables: The sparse tables.
        member: The process groups of the trainers.
        voters: The voters of the memory.
        device: Name of the device.
    """

    run: RunSetup
    corpus: Corpus
    model: Any
    tables: TensorGroupTables
    member: Membership
    voters: Voters
    device: str

    @torch.no_grad()
    def fit_model(self) -> None:
        """Fit the memory's weights (l, b, c), m if the nearest items vote, and g of each signal, and store them in the model.

        Without validation events the weights keep their values. m is the nearest items' share of the votes; it is fitted with the
        g of before.
        """
        n_signals = len(get_signal_weights(self.model))
        votes = self._compute_held_out_votes().weigh_signals(get_signal_weights(self.model))
        if not self.member.sum_over_trainers(float(len(votes.target)))[0]:
            return
        fits_by_share = {
            share: self._fit_weights(votes.mix_nearest(share))
            for share in (SHARES if self.voters.nearest else (0.0,))
        }
        best_share = max(fits_by_share, key=lambda share: fits_by_share[share][0])
        _, best_weights = fits_by_share[best_share]
        if n_signals:
            mixed = votes.mix_nearest(best_share)
            best_weights, signal_weights = fit_signals(
                lambda candidates, weights: self._sum_likelihood(mixed.weigh_signals(weights), candidates),
                best_weights,
                n_signals,
            )
            set_signal_weights(self.model, signal_weights)
        buffer = getattr(self.model, MEMORY_WEIGHTS)  # It has 3 weights, or 4 if the nearest items vote.
        buffer.copy_(torch.tensor((*best_weights, best_share)[: len(buffer)], dtype=buffer.dtype))

    def _fit_weights(self, votes: HeldOutVotes) -> tuple[float, tuple[float, float, float]]:
        """Return the largest log-likelihood and the weights (l, b, c) that reach it."""
        weights = fit(lambda candidates: self._sum_likelihood(votes, candidates))
        return float(self._sum_likelihood(votes, [weights])[0]), weights

    def _sum_likelihood(
        self, votes: HeldOutVotes, candidates: Sequence[tuple[float, float, float]]
    ) -> np.ndarray:
        """Compute the log-likelihood of each candidate (l, b, c), summed over all ranks."""
        return np.array(self.member.sum_over_trainers(*votes.compute_likelihood(candidates).tolist()))

    def _compute_held_out_votes(self) -> HeldOutVotes:
        """Compute the votes for this rank's share of the events. All ranks must call this method."""
        users, positions = self._select_events()
        own_events = slice(*split_evenly(len(users), self.member.data_world)[self.member.data_rank])
        users, positions = users[own_events], positions[own_events]
        parts = split_by_size(np.ones(len(users), np.int64), _CHUNK_EVENTS)
        share = StepShare(
            [self._bind_batch(users[p], positions[p]) for p in parts], self.run.features, self.device
        )
        rows = share.pull_frozen_rows(self.tables)
        self.tables.stop()
        self.model.eval()
        with join_passes(self.model):
            chunk_votes = [
                self._compute_chunk_votes(users[part], positions[part], chunk.batch, chunk.spread(rows))
                for part, chunk in zip(parts, share, strict=True)
            ]
        return HeldOutVotes.joined(chunk_votes)

    def _select_events(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw at most `_MAX_EVENTS` validation events whose item can be recommended. Returns users and positions."""
        seq = self.corpus.seq
        users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
        if len(users) <= _MAX_EVENTS:
            return users, positions
        drawn = np.sort(rng(self.run.seed, "memory").permutation(len(users))[:_MAX_EVENTS])
        return users[drawn], positions[drawn]

    def _bind_batch(self, users: np.ndarray, positions: np.ndarray) -> Any:
        """Return a function that makes the batch of these prompts."""
        return partial(
            make_prompt_batch,
            self.corpus.seq,
            self.corpus.sids,
            users,
            positions,
            history=self.run.history,
            stage="memory",
        )

    def _compute_chunk_votes(
        self, users: np.ndarray, positions: np.ndarray, batch: Any, rows: Any
    ) -> HeldOutVotes:
        """Compute the model's and the voters' log-probabilities of the targets and of the items with votes.

        Args:
            users: Users [U] of the chunk's events.
            positions: Their positions [U].
            batch: Batch of the chunk.
            rows: Sparse rows of the chunk by feature.
        """
        trie, device = self.corpus.trie, self.device
        votes = self.voters.compute_votes(
            self.corpus.seq, users, positions, similarity_weights=compute_similarity_weights(self.model)
        ).to(device)
        target_U = self.corpus.seq.item[locate_events(self.corpus.seq, users, positions)].astype(np.int64)
        target_leaf_U = torch.from_numpy(np.asarray(trie.leaf_of_item)[target_U].astype(np.int64))
        leaf_U1 = target_leaf_U[:, None].to(device)
        cache = self.model.prefill(move_batch(batch, device), rows)
        transition_votes, nearest_UV = votes.merge_voters(self.model, cache.state)
        _, voted_UVL, target_U1L = remember(self.model, cache, trie, transition_votes, leaf_U1)
        return HeldOutVotes.of(
            target_U1L.sum(-1)[:, 0], voted_UVL.sum(-1), transition_votes, leaf_U1, nearest_UV
        )
