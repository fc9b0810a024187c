"""Recommender: a model with its sparse rows and its corpus, which generates and scores items for prompts.

Rollout, evaluation and `nonet recommend` use the same code: rows come from a `SparseReader`, prompts are (user, position)
pairs, and beams and exhaustive scores are those of the constrained distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.reading import LocalReader, SparseReader
from nonet.models.generation.beams import Beams, SubCatalogue, search_beams
from nonet.models.generation.corpus import Corpus
from nonet.models.generation.exhaustive import mix_votes, score_items
from nonet.models.generation.votes import Voters, Votes
from nonet.samples.batches import gather_masked_items, make_prompt_batch
from nonet.samples.sequences import Sequences
from nonet.types import Jagged, SampleBatch

# Shapes: U prompts, W beams, I items, N events.


def get_keys(batch: SampleBatch, feature: str) -> Tensor:
    """Return the sparse keys of a feature: those of items and event features per event [N], those of users per sequence [B]."""
    values = batch.context[feature]
    return values if isinstance(values, Tensor) else values.values


def move_batch(batch: SampleBatch, device: Any) -> SampleBatch:
    """Move a batch to a device; return it unchanged for the host.

    Batches are created on the host, where sparse rows are requested.
    """
    if torch.device(device).type == "cpu":
        return batch
    context = {name: _move(value, device) for name, value in batch.context.items()}
    moved = {
        field: _move(getattr(batch, field), device)
        for field in ("item", "sid", "time", "event", "loss_mask", "target")
    }
    return replace(batch, context=context, **moved)


def _move(value: Any, device: Any) -> Any:
    if isinstance(value, Jagged):
        return Jagged(value.values.to(device), value.offsets.to(device))
    return None if value is None else value.to(device)


class Recommender:
    """Generates and scores items for prompts (users [U], positions [U]): the events of a user before that position.

    It computes on the model's device; batches come from the host and results return there. With `voters` it uses the mixture of
    the model and its memory.
    """

    def __init__(
        self,
        model: Any,
        reader: SparseReader,
        features: dict[str, str],
        corpus: Corpus,
        history: int,
        voters: Voters | None = None,
    ):
        self.voters, self._read_version = voters, None
        self.model, self.reader, self.features, self.corpus, self.history = (
            model,
            reader,
            features,
            corpus,
            history,
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def batch(self, users: np.ndarray, positions: np.ndarray, stage: str = "ask") -> SampleBatch:
        """Pack the prompts into a batch."""
        return make_prompt_batch(
            self.corpus.seq, self.corpus.sids, users, positions, history=self.history, stage=stage
        )

    def read_rows(self, batch: SampleBatch) -> dict[str, Tensor]:
        """Read the sparse rows of a batch (on the host) by feature, to the model's device."""
        return {
            feature: self.reader.read_rows(table, get_keys(batch, feature)).to(self.device)
            for feature, table in self.features.items()
        }

    @torch.no_grad()
    def generate_beams(
        self,
        batch: SampleBatch,
        width: int,
        users: np.ndarray,
        positions: np.ndarray,
        within: SubCatalogue | None = None,
    ) -> Beams:
        """Generate the `width` best items of each prompt `within` a sub-catalogue, without the masked ones."""
        beams = search_beams(
            self.model,
            self.prefill(batch),
            self.corpus.trie,
            width,
            forbidden=gather_masked_items(self.corpus.seq, users, positions),
            votes=self.compute_votes(users, positions),
            within=within,
        )
        return Beams(beams.item.cpu(), beams.sid.cpu(), beams.logp.cpu(), beams.valid.cpu())

    @torch.no_grad()
    def score_catalogue(self, batch: SampleBatch, users: np.ndarray, positions: np.ndarray) -> Tensor:
        """Compute the log-probability [U, I] in nats of every catalogue item for each prompt; nothing is masked."""
        return self._score_both(batch, users, positions)[0].cpu()

    @torch.no_grad()
    def score_with_and_without_votes(
        self, batch: SampleBatch, users: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Compute `score_catalogue` with and without the memory's votes, [U, I] each, in one pass."""
        mixed, own = self._score_both(batch, users, positions)
        return mixed.cpu(), own.cpu()

    def _score_both(
        self, batch: SampleBatch, users: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        cache, votes = self.prefill(batch), self.compute_votes(users, positions)
        own = score_items(self.model, cache, self.corpus.trie)
        if votes is None:
            return own, own
        return mix_votes(self.model, self.corpus.trie, own, votes, cache.state), own

    def compute_votes(
        self,
        users: np.ndarray,
        positions: np.ndarray,
        seq: Sequences | None = None,
        hidden: Jagged | None = None,
        within: SubCatalogue | None = None,
    ) -> Votes | None:
        """Compute the votes for each prompt, on the model's device; None without a memory.

        Args:
            users: User of each prompt.
            positions: Number of events before each prompt.
            seq: Events of other users than the corpus's.
            hidden: Items that get no votes; by default those that the data's policy masks.
            within: The sub-catalogue that voted items must belong to.
        """
        if self.voters is None:
            return None
        if self.voters.nearest:
            self._read_items(self.voters)
        seq = self.corpus.seq if seq is None else seq
        return self.voters.compute_votes(seq, users, positions, hidden, within).to(self.device)

    def _read_items(self, voters: Voters) -> None:
        """Read the rows of all items once per version.

        In a process that trains, rows change without a new version, so they are read on each call.
        """
        version = None if isinstance(self.reader, LocalReader) else self.reader.version
        if version is None or version != self._read_version:
            keys = torch.from_numpy(self.corpus.seq.get_item_keys(voters.items))
            voters.read(self.reader.read_rows(self.features["item"], keys))
            self._read_version = version

    def prefill(self, batch: SampleBatch) -> Any:
        """Run the model's prefill on each prompt's history, on its device."""
        self.model.eval()
        return self.model.prefill(move_batch(batch, self.device), self.read_rows(batch))

    def iterate_batches(
        self, users: np.ndarray, positions: np.ndarray, size: int
    ) -> Iterator[tuple[SampleBatch, np.ndarray, np.ndarray]]:
        """Iterate over batches of `size` prompts in order, with their users and positions."""
        for start in range(0, len(users), size):
            part = slice(start, start + size)
            yield self.batch(users[part], positions[part]), users[part], positions[part]
