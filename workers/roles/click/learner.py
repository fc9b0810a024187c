"""ClickLearner: trains a click model on batches of events, with one dense and one sparse step per batch.

Losses are divided by the number of rows on all ranks. With tasks, the loss of a row is the weighted sum over its known labels.
A Keras model adds the losses of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from nonet.embedding.modules import EmbeddingBagCollection
from nonet.samples.sources import SampleRequest
from nonet.workers import PrefetchedRows, SparseBatch
from nonet.workers.engines import run_backward
from nonet.workers.engines.division import is_divided
from nonet.workers.roles.click.data import make_click_setup
from nonet.workers.roles.learners import SupervisedLearner

# Shapes: M unique keys, D width.


class ClickLearner(SupervisedLearner):
    """Trains a stage on batches of labelled events."""

    def make_request(self) -> SampleRequest:
        """Return the request that opens the source of the stage's samples: one row per event."""
        data = self.context.corpus
        return self._build_request("events", lambda: data.seq, lambda: data.items, joins=data.joins)

    def read_batch(self, step: int) -> SparseBatch:
        """Read this rank's events of a step, with the keys of their bags (features with several keys per event)."""
        (make_batch,) = self.samples.batch(step, self.context.rank, self.context.world)
        batch = make_batch()
        return SparseBatch(batch, self._bags.list_keys(batch.bags), places={})

    def take_step(
        self, step: int, batch: SparseBatch, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        """Take one dense step on rows [M, D] by table (`SupervisedLearner.take_step`)."""
        context, device = self.context, self.context.device
        clicks, all_events = batch.batch, batch.batch.step_rows
        label = torch.from_numpy(clicks.label)
        weight = None if clicks.weight is None else torch.from_numpy(clicks.weight).to(device)
        self.seed_dropout(step)
        context.model.train()
        self._bags.source = source = PrefetchedRows(rows)
        with context.meter.time_section("dense"):
            loss, pooled = torch.zeros(()), self._bags(batch.batch.bags, device)
            # A rank's share may be empty; it still takes part in the collectives.
            if len(label) or is_divided(context.model):
                with self.precision.cast(device):
                    loss = context.model.compute_loss(pooled, label.to(device), weight, all_events)
                scaled_loss = self.precision.scale_loss(loss / all_events)
                run_backward(context.dense, scaled_loss, is_last=not self.precision.scales)
        total_loss = context.member.sum_over_trainers(float(loss.detach()))[0]
        self._bags.push(step)  # Into `source.grads`.
        return self.finish_step(step, total_loss / all_events, float(all_events), batch.keys, source.grads)

    @cached_property
    def _bags(self) -> EmbeddingBagCollection:
        """The pooled embeddings of all features; each step gives them the rows of its keys."""
        return make_click_setup(self.context.run).build_bags(PrefetchedRows({}))
