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
from nonet.workers.engines import StepPrecision, run_backward
from nonet.workers.engines.division import is_divided
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
        ends_step: Whether a step computes no other gradients afterwards.
    """

    context: LearnerContext
    stage: StageSetup
    precision: StepPrecision = field(default_factory=StepPrecision)
    ends_step: bool = False

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
        self, share: StepShare, rows: Mapping[str, Tensor], begin_chunk: Callable[[int], None]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the gradients of a step, and accumulate those of the model in its parameters.

        Args:
            share: This rank's share of the step, in chunks.
            rows: Sparse rows [M, D] by table.
            begin_chunk: Called with the index of each chunk before its forward pass.

        Returns:
            The gradients of the rows [M, D] by table; and {"loss": nats per target, "events": number of targets} over all ranks,
            with "nearest_loss" if nearest items vote.
        """
        leaves = {
            table: table_rows.detach().to(self.context.device).requires_grad_()
            for table, table_rows in rows.items()
        }
        targets, sid_sum, nearest_sum = float(share.targets), 0.0, 0.0
        all_targets = self.context.member.sum_over_trainers(targets)[0]
        model_is_divided, n_passes = is_divided(self.context.model), self.context.count_passes(len(share))
        for index, chunk in enumerate(share.iterate(n_passes)):
            begin_chunk(index)
            # A rank's share may have no target; it still takes part in the collectives.
            if not (model_is_divided or bool(chunk.batch.loss_mask.values.any())):
                continue
            with self.precision.cast(self.context.device):
                losses = self._compute_losses(
                    share, leaves, move_batch(chunk.batch, self.context.device), chunk.spread(leaves)
                )
            loss = self.precision.scale_loss(torch.stack(losses).sum() / max(all_targets, 1.0))
            is_last = self.ends_step and index == n_passes - 1 and not self.precision.scales
            run_backward(self.context.dense, loss, is_last=is_last)
            sid_loss, *nearest_loss = losses
            sid_sum += float(sid_loss.detach())
            nearest_sum += sum(float(loss.detach()) for loss in nearest_loss)
        all_sums = self.context.member.sum_over_trainers(sid_sum, nearest_sum)
        mean_sid_loss, mean_nearest_loss = (total / max(all_targets, 1.0) for total in all_sums)
        grads = {
            table: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(rows[table].device)
            for table, leaf in leaves.items()
        }
        record = {"loss": mean_sid_loss, "events": all_targets}
        return grads, record | ({"nearest_loss": mean_nearest_loss} if share.also else {})

    def _compute_losses(
        self,
        share: StepShare,
        leaves: Mapping[str, Tensor],
        batch: SampleBatch,
        feature_rows: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Compute the losses of a chunk in nats, summed over targets.

        Args:
            share: This rank's share of the step.
            leaves: Sparse rows [M, D] by table, with gradients.
            batch: The batch of the chunk.
            feature_rows: Sparse rows of the chunk by feature.

        Returns:
            The loss of the semantic ids and, if nearest items vote, that of the targets among the items.
        """
        model, weight_M = self.context.dense.model, self._compute_target_weights(batch)
        state_TD = model.states(batch, feature_rows)
        sid_loss, _ = compute_sid_loss(
            model,
            batch,
            feature_rows,
            self.context.corpus.trie,
            ahead=self.stage.ahead,
            smoothing=self.stage.smoothing,
            weight_M=weight_M,
            state_TD=state_TD,
        )
        if not share.also:
            return (sid_loss,)
        assert self.context.voters is not None
        table, is_target_T = self.context.run.features["item"], batch.loss_mask.values
        nearest_loss = compute_nearest_loss(
            model,
            batch,
            state_TD[model.target_positions(batch)],
            feature_rows["item"][is_target_T],
            share.also[table].to(self.context.device),
            share.select_extra_rows(table, leaves),
            len(self.context.voters.items),
            weight_M,
        )
        return sid_loss, nearest_loss

    def _compute_target_weights(self, batch: SampleBatch) -> Tensor | None:
        """Return the weight of each target of a batch [M]; None if all have weight 1."""
        if not self.stage.weight and not self.stage.propensity:
            return None
        is_target_T = batch.loss_mask.values
        weight_M = self._weight_by_kind[batch.event.values[is_target_T]]
        if self.stage.propensity:
            weight_M = weight_M * self._invert_propensity(
                batch.context[self.stage.propensity["column"]].values[is_target_T]
            )
        return weight_M / self._mean_weight

    @cached_property
    def _weight_by_kind(self) -> Tensor:
        """Weight of a target by index of its kind of event, before normalisation to a mean of 1."""
        names = self.context.corpus.seq.event_names or ("",)
        return torch.tensor([self.stage.weight.get(kind, 1.0) for kind in names], device=self.context.device)

    @cached_property
    def _mean_weight(self) -> float:
        """Mean weight of the stage's training events."""
        total_weight, event_count = 0.0, 0
        for part in self.context.corpus.seq.iterate_parts():
            is_target = part.split == TRAIN
            if self.stage.target:
                is_target &= part.find_targets(self.stage.target)
            weight = self._weight_by_kind.cpu()[torch.from_numpy(part.event[is_target].astype(np.int64))]
            if self.stage.propensity:
                propensity = np.nan_to_num(part.columns[self.stage.propensity["column"]][is_target])
                weight = weight * self._invert_propensity(torch.from_numpy(propensity))
            total_weight += float(weight.sum(dtype=torch.float64))
            event_count += len(weight)
        return total_weight / event_count if total_weight else 1.0

    def _invert_propensity(self, propensity: Tensor) -> Tensor:
        """Compute inverse propensities (Schnabel et al. 2016), clipped at `most`; 1 where the propensity is unknown."""
        max_weight = float(self.stage.propensity["most"])
        return torch.where(propensity > 0, 1 / propensity.clamp_min(1 / max_weight), 1.0)
