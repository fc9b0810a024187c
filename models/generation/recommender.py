"""Generates and scores items for prompts with a model, its sparse rows and a corpus.

Rollout, evaluation and `nonet recommend` use this class. Sparse rows are read from a `SparseReader`, a prompt is a (user,
position) pair, and beams and scores follow the model's distribution over the semantic ids in the trie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.reading import LocalReader, SparseReader
from nonet.models.generation.beams import Beams, SubCatalogue, search_beams
from nonet.models.generation.corpus import Corpus
from nonet.models.generation.exhaustive import mix_votes, score_items
from nonet.models.generation.memory import compute_similarity_weights
from nonet.models.generation.votes import Voters, Votes
from nonet.samples.batches import gather_masked_items, make_prompt_batch
from nonet.samples.sequences import Sequences
from nonet.types import Jagged, SampleBatch

# Shapes: U prompts, W beams, I items, N events.


def get_keys(batch: SampleBatch, feature: str) -> Tensor:
    """Return the sparse keys of a feature: [N], one per event, for items and event features, or [B], one per user."""
    values = batch.context[feature]
    return values if isinstance(values, Tensor) else values.values


def move_batch(batch: SampleBatch, device: Any) -> SampleBatch:
    """Return a batch on a device; it is the same batch if the device is the CPU, where batches are created."""
    if torch.device(device).type == "cpu":
        return batch
    context = {name: _move_to_device(value, device) for name, value in batch.context.items()}
    moved = {
        field: _move_to_device(getattr(batch, field), device)
        for field in ("item", "sid", "time", "event", "loss_mask", "target")
    }
    return replace(batch, context=context, **moved)


def _move_to_device(value: Any, device: Any) -> Any:
    """Return a tensor or a Jagged of tensors on a device; None stays None."""
    if isinstance(value, Jagged):
        return Jagged(value.values.to(device), value.offsets.to(device))
    return None if value is None else value.to(device)


class Recommender:
    """Generates and scores items for prompts.

    A prompt is the events of a user before a position, given by users [U] and positions [U]. Computation is on the model's
    device; batches and results are on the host.

    Args:
        model: The model.
        reader: Reader of the sparse rows.
        features: Name of the table of each sparse feature.
        corpus: The sequences, semantic ids and trie.
        history: Maximum number of events in a prompt.
        voters: The memory; with it, the distribution is the mixture of the model and the memory.
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
        self.voters, self._item_rows_version = voters, None
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
        """Build a batch of prompts on the host, with at most `history` events each."""
        return make_prompt_batch(
            self.corpus.seq, self.corpus.sids, users, positions, history=self.history, stage=stage
        )

    def read_rows(self, batch: SampleBatch) -> dict[str, Tensor]:
        """Read the sparse rows of a batch that is on the host; return them by feature on the model's device."""
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
        """Generate the best items of each prompt by beam search, without the items that the data's policy masks.

        Args:
            batch: The batch of the prompts.
            width: Number of items per prompt.
            users: User of each prompt [U].
            positions: Number of events before each prompt [U].
            within: The sub-catalogue to which items are restricted; None for the complete catalogue.

        Returns:
            The beams, on the host.
        """
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

    def score_catalogue(self, batch: SampleBatch, users: np.ndarray, positions: np.ndarray) -> Tensor:
        """Compute the log-probability [U, I] in nats of every catalogue item for each prompt, without masking any item."""
        return self.score_with_voters(batch, users, positions, [self.get_voters()])[0]

    @torch.no_grad()
    def score_with_voters(
        self, batch: SampleBatch, users: np.ndarray, positions: np.ndarray, voters: Sequence[Voters | None]
    ) -> list[Tensor]:
        """Compute the scores of `score_catalogue` [U, I] with each of these voters, in one pass of the model.

        Args:
            batch: The batch of the prompts.
            users: User of each prompt [U].
            positions: Number of events before each prompt [U].
            voters: Voters of a memory, which `get_voters` or `Voters.leave_out` of these return; None for the model alone.
        """
        cache = self.prefill(batch)
        own_UI = score_items(self.model, cache, self.corpus.trie)
        scores = []
        for each in voters:
            if each is None:
                scores.append(own_UI.cpu())
                continue
            votes = self._compute_votes(each, self.corpus.seq, users, positions)
            scores.append(mix_votes(self.model, self.corpus.trie, own_UI, votes, cache.state).cpu())
        return scores

    def compute_votes(
        self,
        users: np.ndarray,
        positions: np.ndarray,
        seq: Sequences | None = None,
        hidden: Jagged | None = None,
        within: SubCatalogue | None = None,
    ) -> Votes | None:
        """Compute the memory's votes for each prompt, on the model's device; None if there is no memory.

        Args:
            users: User of each prompt.
            positions: Number of events before each prompt.
            seq: The sequences that contain the users; by default those of the corpus.
            hidden: Items that get no votes; by default those that the data's policy masks.
            within: The sub-catalogue to which votes are restricted.
        """
        voters = self.get_voters()
        if voters is None:
            return None
        return self._compute_votes(
            voters, self.corpus.seq if seq is None else seq, users, positions, hidden, within
        )

    def _compute_votes(self, voters: Voters, *prompts: Any) -> Votes:
        """Compute the votes of voters on the model's device; the arguments are those of `Voters.compute_votes`."""
        weights = compute_similarity_weights(self.model)
        return voters.compute_votes(*prompts, similarity_weights=weights).to(self.device)

    def get_voters(self) -> Voters | None:
        """Return the voters of the memory with the present rows of their items; None without a memory."""
        if self.voters is not None and self.voters.nearest:
            self._refresh_item_rows(self.voters)
        return self.voters

    def _refresh_item_rows(self, voters: Voters) -> None:
        """Give the voters the present rows of their items, which are read only if the reader has a new version.

        A `LocalReader` is in the process that trains, where rows change without a new version, so it is read on each call.
        """
        version = None if isinstance(self.reader, LocalReader) else self.reader.version
        if version is None or version != self._item_rows_version:
            keys = torch.from_numpy(self.corpus.seq.get_item_keys(voters.items))
            voters.read(self.reader.read_rows(self.features["item"], keys))
            self._item_rows_version = version

    def prefill(self, batch: SampleBatch) -> Any:
        """Run the model's prefill on the histories of the prompts, in evaluation mode and on the model's device."""
        self.model.eval()
        return self.model.prefill(move_batch(batch, self.device), self.read_rows(batch))

    def iterate_batches(
        self, users: np.ndarray, positions: np.ndarray, size: int
    ) -> Iterator[tuple[SampleBatch, np.ndarray, np.ndarray]]:
        """Yield batches of up to `size` prompts in order, with their users and positions."""
        for start in range(0, len(users), size):
            prompts = slice(start, start + size)
            yield self.batch(users[prompts], positions[prompts]), users[prompts], positions[prompts]
