"""ClickTrainer: the trainer of a click model; a step is rows of events, a DeepFM's loss, one dense and one sparse step.

Gangs, optimizer, commits and resuming are the trainer's own. Losses are divided by the rows of all ranks. A tenth of a
step's rows learn without their moment, so that the model can be asked about a moment that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.modules import EmbeddingBagCollection
from nonet.models.deepfm import ClickSetup, save_clicks
from nonet.models.generation import as_array, read_items
from nonet.random import rng
from nonet.samples.batches import Clicks, step_rows
from nonet.samples.sequences import TRAIN, Sequences
from nonet.workers.devices import claim
from nonet.workers.roles import Asked, Dense, Given, RunSetup, StageSetup, Trainer
from nonet.workers.runtime import Replicate, method

_TIMELESS = 0.1


def click_setup(run: RunSetup) -> ClickSetup:
    """What the model is made of."""
    return ClickSetup(run.model, run.tables, run.features, run.combiners, run.history, run.seed)


class ClickTrainer(Trainer):
    """One rank of a click model's trainers."""

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, int]:
        """Open the events and build the model; its parameters and the users there are."""
        self._seq, self._items = Sequences.load(folders["sequences"]), read_items(folders)
        self._known: dict[str, Clicks] = {}
        self._bags: EmbeddingBagCollection | None = None
        self._last = ""
        self.model = click_setup(self.run).build().to(claim(self.device))
        self.dense = Dense(self.model, self._member)
        return {"parameters": sum(p.numel() for p in self.model.parameters()), "users": len(self._seq)}

    def _parts(self) -> list[Callable[[Path], list[Path]]]:
        """Dense weights and folder/clicks/: a commit is a whole click model."""
        setup, clicks = click_setup(self.run), self._clicks(self._last)
        items = as_array(self._items["item_id"])
        return [*super()._parts(), lambda folder: save_clicks(folder, setup, clicks, items)]

    def _read(self, stage: StageSetup, step: int) -> Asked:
        clicks = self._clicks(stage.target or "")
        rows = clicks.rows(TRAIN)
        _, places = step_rows(len(rows), stage.users, self.run.seed, stage.name, step)
        timeless = rng(self.run.seed, stage.name, step, "timeless").random(len(places)) < _TIMELESS
        mine = slice(self.rank, None, self.world)
        index = rows[places][mine]
        bags = clicks.batch(index, timeless=timeless[mine])
        label = torch.from_numpy(clicks.label[index])
        return Asked((bags, label, len(places)), self._collection().asked(bags), {})

    def _computed(
        self, stage: StageSetup, step: int, read: Asked, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        batch, label, events = read.batch
        self._draw_dropout(stage, step)
        self.model.train()
        bags = self._collection()
        bags.source = given = Given(rows)
        loss, pooled = torch.zeros(()), bags(batch, self.device)
        if len(label):  # a rank's share may be empty; it still meets the others
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                self.model(pooled), label.to(self.device), reduction="sum"
            )
            (loss / events).backward()
        total = self.dense.total(float(loss.detach()))[0]
        bags.push(step)
        return given.grads, self._stepped(stage, step, total / events, float(events))

    def _clicks(self, target: str) -> Clicks:
        """The events, labelled by a stage's condition."""
        self._last = target = target or next(iter(self._seq.targets))
        if target not in self._known:
            label = self._seq.targets[target].astype(np.float32)
            self._known[target] = Clicks.of(
                self._seq, self._items, label, list(self.run.features), self.run.history
            )
        return self._known[target]

    def _collection(self) -> EmbeddingBagCollection:
        if self._bags is None:
            self._bags = EmbeddingBagCollection(click_setup(self.run).configs(), Given({}))
        return self._bags
