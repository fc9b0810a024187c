"""Recommender: a model, its sparse rows and the corpus, asked about prompts.

One code path for rollout, evaluation and `nonet recommend`: the rows come through a `SparseReader`, the prompts are
(user, position) pairs, and beams and exhaustive scores are those of the constrained distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.reader import SparseReader
from nonet.rl.beam import Beams, beam_search
from nonet.rl.corpus import Corpus
from nonet.rl.exhaustive import score_items
from nonet.samples.batches import prompt_batch
from nonet.samples.prompts import seen
from nonet.types import SampleBatch

# Shapes: U prompts, W beams, I items, N events.


def keys_of(batch: SampleBatch, feature: str) -> Tensor:
    """Sparse keys of a feature: "item" [N] from the events, any other from `context` ([B], or Jagged [N])."""
    if feature == "item":
        return batch.item.values
    values = batch.context[feature]
    return values if isinstance(values, Tensor) else values.values


class Recommender:
    """Answers for prompts (users [U], positions [U]): the events of a user before that position."""

    def __init__(
        self, model: Any, reader: SparseReader, features: dict[str, str], corpus: Corpus, history: int
    ):
        self.model, self.reader, self.features, self.corpus, self.history = (
            model,
            reader,
            features,
            corpus,
            history,
        )

    def batch(self, users: np.ndarray, positions: np.ndarray, stage: str = "ask") -> SampleBatch:
        """The prompts as a packed batch."""
        return prompt_batch(
            self.corpus.seq, self.corpus.sids, users, positions, history=self.history, stage=stage
        )

    def rows(self, batch: SampleBatch) -> dict[str, Tensor]:
        """The sparse rows of a batch, by feature."""
        return {
            feature: self.reader.rows(table, keys_of(batch, feature))
            for feature, table in self.features.items()
        }

    @torch.no_grad()
    def beams(self, batch: SampleBatch, width: int, users: np.ndarray, positions: np.ndarray) -> Beams:
        """The `width` best items of each prompt, without those the user has seen."""
        self.model.eval()
        cache = self.model.prefill(batch, self.rows(batch))
        return beam_search(
            self.model, cache, self.corpus.trie, width, forbidden=seen(self.corpus.seq, users, positions)
        )

    @torch.no_grad()
    def scores(self, batch: SampleBatch) -> Tensor:
        """Log-probability of every catalogue item for each prompt [U, I], nats; nothing masked."""
        self.model.eval()
        return score_items(self.model, self.model.prefill(batch, self.rows(batch)), self.corpus.trie)

    def chunks(
        self, users: np.ndarray, positions: np.ndarray, size: int
    ) -> Iterator[tuple[SampleBatch, np.ndarray, np.ndarray]]:
        """The prompts in order, `size` at a time."""
        for start in range(0, len(users), size):
            part = slice(start, start + size)
            yield self.batch(users[part], positions[part]), users[part], positions[part]
