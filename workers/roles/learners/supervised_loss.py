"""SupervisedLoss: the losses of a supervised step on one rank, of semantic ids and of nearest items, and their gradients.

Losses are divided by the number of targets on all ranks, so the gradients of ranks and chunks add up to those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import compute_nearest_loss, move_batch
from nonet.models.sid_decoder import compute_sid_loss
from nonet.random import rng
from nonet.samples.sequences import TRAIN
from nonet.types import SampleBatch
from nonet.workers import StepShare
from nonet.workers.engines import StepPrecision
from nonet.workers.roles import LearnerContext, StageSetup

# Shapes: T positions, M targets, C items that may be near, D width.

NEGATIVES = 2048  # Number of negatives of the sampled softmax over items, if nearest items vote.


@dataclass(frozen=True)
class SupervisedLoss:
    """Computes the losses of a stage's batches and their gradients.

    Attributes:
        context: Objects shared with the trainer.
        stage: The stage.
        precision: Precision of the forward and backward pass.
    """

    context: LearnerContext
    stage: StageSetup
    precision: StepPrecision = field(default_factory=StepPrecision)

    def draw_negatives(self, step: int) -> dict[str, Tensor]:
        """Draw the item keys of the sampled softmax, by table, ascending; the same on every rank.

        Empty if no nearest items vote.
        """
        if self.context.voters is None or not self.context.voters.nearest:
            return {}
        draw = rng(self.context.run.seed, self.stage.name, step, "negatives")
        items = self.context.voters.items
        drawn = items[draw.choice(len(items), min(NEGATIVES, len(items)), replace=False, shuffle=False)]
        keys = torch.from_numpy(self.context.corpus.seq.get_item_keys(drawn))
        return {self.context.run.features["item"]: keys.sort().values}

    def compute_gradients(
        self, read: StepShare, rows: Mapping[str, Tensor], begin_chunk: Callable[[int], None]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the gradients of a step, and accumulate those of the model in its parameters.

        Args:
            read: This rank's share of the step, in chunks.
            rows: Sparse rows [M, D] by table.
            begin_chunk: Called with the number of each chunk before its forward pass.

        Returns:
            The gradients of the rows [M, D] by table, and over all ranks loss (nats per target), events and, if nearest items
            vote, nearest_loss.
        """
        leaves = {
            table: table_rows.detach().to(self.context.device).requires_grad_()
            for table, table_rows in rows.items()
        }
        total, sums = self.context.member.sum_over_trainers(float(read.targets))[0], (0.0, 0.0)
        for number, chunk in enumerate(read):
            begin_chunk(number)
            if not bool(chunk.batch.loss_mask.values.any()):
                continue  # A rank's share may have no target; it still takes part in the collectives.
            with self.precision.cast(self.context.device):
                losses = self._compute_losses(
                    read, leaves, move_batch(chunk.batch, self.context.device), chunk.spread(leaves)
                )
            self.context.dense.backward(
                self.precision.scale_loss(torch.stack(losses).sum() / max(total, 1.0))
            )
            sums = sums[0] + float(losses[0].detach()), sums[1] + sum(float(x.detach()) for x in losses[1:])
        loss, near = (each / max(total, 1.0) for each in self.context.member.sum_over_trainers(*sums))
        grads = {
            table: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(rows[table].device)
            for table, leaf in leaves.items()
        }
        return grads, {"loss": loss, "events": total} | ({"nearest_loss": near} if read.also else {})

    def _compute_losses(
        self, read: StepShare, leaves: Mapping[str, Tensor], batch: SampleBatch, spread: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute the losses of a chunk in nats, summed over targets.

        Returns:
            The loss of the semantic ids and, if nearest items vote, that of the targets among the items.
        """
        model, weight_M = self.context.dense.model, self._compute_target_weights(batch)
        state_TD = model.states(batch, spread)
        loss, _ = compute_sid_loss(
            model,
            batch,
            spread,
            self.context.corpus.trie,
            ahead=self.stage.ahead,
            smoothing=self.stage.smoothing,
            weight_M=weight_M,
            state_TD=state_TD,
        )
        if not read.also:
            return (loss,)
        assert self.context.voters is not None
        table, taught = self.context.run.features["item"], batch.loss_mask.values
        near = compute_nearest_loss(
            model,
            batch,
            state_TD[model.target_positions(batch)],
            spread["item"][taught],
            read.also[table].to(self.context.device),
            read.select_extra_rows(table, leaves),
            len(self.context.voters.items),
            weight_M,
        )
        return loss, near

    def _compute_target_weights(self, batch: SampleBatch) -> Tensor | None:
        """Return the weight of each target of a batch [M]; None if all have weight 1."""
        if not self.stage.weight and not self.stage.propensity:
            return None
        taught = batch.loss_mask.values
        weight_M = self._of_kinds[batch.event.values[taught]]
        if self.stage.propensity:
            weight_M = weight_M * self._invert_propensity(
                batch.context[self.stage.propensity["column"]].values[taught]
            )
        return weight_M / self._mean

    @cached_property
    def _of_kinds(self) -> Tensor:
        """Weight of a target by kind of event, before normalisation to a mean of 1."""
        names = self.context.corpus.seq.event_names or ("",)
        return torch.tensor([self.stage.weight.get(kind, 1.0) for kind in names], device=self.context.device)

    @cached_property
    def _mean(self) -> float:
        """Mean weight of the stage's training events."""
        total, events = 0.0, 0
        for part in self.context.corpus.seq.iterate_parts():
            taught = part.split == TRAIN
            if self.stage.target:
                taught &= part.targets[self.stage.target]
            weight = self._of_kinds.cpu()[torch.from_numpy(part.event[taught].astype(np.int64))]
            if self.stage.propensity:
                values = np.nan_to_num(part.columns[self.stage.propensity["column"]][taught])
                weight = weight * self._invert_propensity(torch.from_numpy(values))
            total, events = total + float(weight.sum(dtype=torch.float64)), events + len(weight)
        return total / events if total else 1.0

    def _invert_propensity(self, chance: Tensor) -> Tensor:
        """Compute inverse propensities (Schnabel et al. 2016), clipped at `most`; 1 where the propensity is unknown."""
        most = float(self.stage.propensity["most"])
        return torch.where(chance > 0, 1 / chance.clamp_min(1 / most), 1.0)
