"""AlignLearner: supervised steps that also align semantic ids with a language model's words (LC-Rec, Zheng et al. 2024)."""

from __future__ import annotations

import numpy as np
import torch

from nonet.random import rng
from nonet.workers.roles.learners.supervised import SupervisedLearner


class AlignLearner(SupervisedLearner):
    """Trains on histories, and for some items per step also predicts the words from the codes and the codes from the words."""

    def add_gradients(self, step: int) -> dict[str, float]:
        """Add the alignment gradients of this rank's items of a step, and return the mean loss per item over all ranks."""
        context, align = self.context, self.stage.align
        draw, items = rng(context.run.seed, self.stage.name, step, "align"), len(context.corpus.items)
        drawn = draw.choice(items, min(int(align["items"]), items), replace=False, shuffle=False)
        own_items = np.sort(drawn)[context.member.rank :: context.member.n_trainers]
        nats = 0.0
        if len(own_items):
            texts = context.corpus.items[align["column"]].take(own_items).to_pylist()
            sid_nL = torch.from_numpy(context.corpus.sids[own_items].astype(np.int64)).to(context.device)
            with self.precision.cast(context.device):
                loss = context.model.compute_alignment_loss(sid_nL, [str(text or "") for text in texts])
            counted = loss * (float(align["weight"]) / len(drawn))
            context.dense.backward(self.precision.scale_loss(counted))
            nats = float(loss.detach())
        return {"align_loss": context.member.sum_over_trainers(nats)[0] / len(drawn)}
