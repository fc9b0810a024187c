"""AlignLearner: supervised steps that also align semantic ids with a language model's words (LC-Rec, Zheng et al. 2024)."""

from __future__ import annotations

import numpy as np
import torch

from nonet.random import rng
from nonet.workers.engines import run_backward
from nonet.workers.engines.division import is_divided
from nonet.workers.roles.learners.supervised import SupervisedLearner


class AlignLearner(SupervisedLearner):
    """Trains on histories and, for some items per step, on predicting their words from their codes and codes from words.

    The option `align` of the stage has the number of items per step, the weight of the loss and the text column.
    """

    def add_gradients(self, step: int) -> dict[str, float]:
        """Add the alignment gradients of this rank's items of a step.

        Returns:
            "align_loss": mean loss per item over all ranks, in nats.
        """
        context, align, n_items = self.context, self.stage.align, len(self.context.corpus.items)
        generator = rng(context.run.seed, self.stage.name, step, "align")
        drawn = generator.choice(n_items, min(int(align["items"]), n_items), replace=False, shuffle=False)
        own_items = np.sort(drawn)[context.member.data_rank :: context.member.data_world]
        nats = 0.0
        own_weight = float(align["weight"]) / len(drawn)
        if not len(own_items) and is_divided(
            context.model
        ):  # This rank takes part in the pass of the others.
            own_items, own_weight = drawn[:1], 0.0
        if len(own_items):
            texts = context.corpus.items[align["column"]].take(own_items).to_pylist()
            sid_nL = torch.from_numpy(context.corpus.sids[own_items].astype(np.int64)).to(context.device)
            with self.precision.cast(context.device):
                loss = context.model.compute_alignment_loss(sid_nL, [str(text or "") for text in texts])
            scaled_loss = self.precision.scale_loss(loss * own_weight)
            run_backward(context.dense, scaled_loss, is_last=not self.precision.scales)
            nats = float(loss.detach()) if own_weight else 0.0
        return {"align_loss": context.member.sum_over_trainers(nats)[0] / len(drawn)}
