"""ClickTrainer: the trainer of a click model; a step is rows of events, a DeepFM's loss, one dense and one sparse step.

Process group, optimizer, commits and resuming are the trainer's own. Losses are divided by the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nonet.embedding.modules import EmbeddingBagCollection
from nonet.models.deepfm import ClickSetup, save_clicks
from nonet.models.generation import as_array, read_items
from nonet.samples.batches import Clicks
from nonet.samples.sequences import Sequences
from nonet.samples.sources import SampleRequest
from nonet.workers import PrefetchedRows, Saving, SparseBatch
from nonet.workers.roles import RunSetup, StageSetup, Trainer
from nonet.workers.runtime import Replicate, method


def click_setup(run: RunSetup) -> ClickSetup:
    """What the model is made of."""
    return ClickSetup(run.model, run.tables, run.features, run.combiners, run.history, run.seed)


class ClickTrainer(Trainer):
    """One rank of a click model's trainers."""

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, int]:
        """Open the item table and build the model, as a Trainer does."""
        self._folders, self._items = folders, read_items(folders)
        self._bags: EmbeddingBagCollection | None = None
        self._last: str | None = None
        self._known: dict[str | None, Clicks] = {}
        return self._built(click_setup(self.run).build())

    def _parts(self, saving: Saving) -> list[Callable[[Path], list[Path]]]:
        """The trainer's, and from rank 0 folder/clicks/: a commit is a whole click model."""
        parts = super()._parts(saving)
        if self.rank:
            return parts
        setup, items = click_setup(self.run), as_array(self._items["item_id"])
        clicks = self._clicks()
        return [*parts, lambda folder: save_clicks(folder, setup, clicks, items)]

    def _read(self, stage: StageSetup, step: int) -> SparseBatch:
        (make,) = self._samples(stage).batch(step, self.rank, self.world)
        batch = make()
        return SparseBatch(batch, self._collection().asked(batch.bags), {})

    def _request(self, stage: StageSetup) -> SampleRequest:
        self._last = stage.target
        return self._request_of(stage, "events", lambda: self._seq, lambda: self._items)

    def _computed(
        self, stage: StageSetup, step: int, read: SparseBatch, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        label, events = torch.from_numpy(read.batch.label), read.batch.step_rows
        self._draw_dropout(stage, step)
        self.model.train()
        bags, precision = self._collection(), self._precision(stage)
        bags.source = rows_source = PrefetchedRows(rows)
        with self._meter.part("dense"):
            loss, pooled = torch.zeros(()), bags(read.batch.bags, self.device)
            if len(label):  # a rank's share may be empty; it still meets the others
                with precision.cast(self.device):
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(
                        self.model(pooled), label.to(self.device), reduction="sum"
                    )
                self.dense.backward(precision.scaled(loss / events))
        total = self._member.total(float(loss.detach()))[0]
        bags.push(step)
        return self._stepped(stage, step, total / events, float(events), read.keys, rows_source.grads)

    def _clicks(self) -> Clicks:
        """The events that commits tell of, labelled by the last stage's condition; made once a condition."""
        if self._last not in self._known:
            features, history = list(self.run.features), self.run.history
            self._known[self._last] = Clicks.labelled(self._seq, self._items, self._last, features, history)
        return self._known[self._last]

    @cached_property
    def _seq(self) -> Sequences:
        return Sequences.load(self._folders["sequences"])

    def _collection(self) -> EmbeddingBagCollection:
        if self._bags is None:
            self._bags = EmbeddingBagCollection(click_setup(self.run).configs(), PrefetchedRows({}))
        return self._bags
