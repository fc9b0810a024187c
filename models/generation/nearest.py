"""Nearest items: a second voter of a memory, which votes for the items whose rows are nearest to a user's state.

    s(y) = (A h) . r(y)

h is the state after a user's newest event, r(y) the item's row that is also its input embedding (tied, as in SASRec: Kang and
McAuley, 2018), A a square or narrow matrix of the model. It is trained together with the semantic ids by sampled softmax, whose
negatives stand for all items of training (log-q correction). Its best items then vote as transitions do, so dense retrieval and
generation are one distribution. Items without a training event get no such votes; they are scored by their codes only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nonet.models.generation.topk import select_top_k
from nonet.types import Jagged, SampleBatch

# Shapes: P prompts, V votes, X votes of both voters, C items of training, n negatives, M targets, D width of a row.

QUERY = "nearest"
"""The matrix A of a model whose memory hears this voter."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows of the items that occur in training and are in the catalogue: leaf [C] int64 ascending, row [C, D] in that order."""

    leaf: Tensor
    row: Tensor


@dataclass(frozen=True, slots=True)
class NearestItems:
    """A deferred vote by nearness for P prompts: it needs the model's states.

    It holds the rows of the items and the hidden (prompt, index of the item) pairs [H]; at most `width` items get votes.
    """

    rows: ItemRows
    prompt: Tensor
    place: Tensor
    width: int

    @classmethod
    def of(cls, rows: ItemRows, leaf_of_item: np.ndarray, hidden: Jagged, width: int) -> NearestItems:
        """Build from item rows; `hidden` has the dense item indices that each prompt may not list."""
        leaf = torch.from_numpy(np.asarray(leaf_of_item)[hidden.values].astype(np.int64))
        prompt = torch.repeat_interleave(torch.from_numpy(np.diff(hidden.offsets)))
        place = torch.searchsorted(rows.leaf, leaf).clamp_max(max(0, len(rows.leaf) - 1))
        there = rows.leaf[place] == leaf if len(rows.leaf) else torch.zeros_like(leaf, dtype=torch.bool)
        return cls(rows, prompt[there], place[there], width)

    def compute_votes(self, model: nn.Module, state_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the leaves [P, V] and their votes [P, V], which sum to 1 per prompt; differentiable."""
        asked_PD = query(model, state_PD)
        asked_PD = asked_PD.to(torch.promote_types(asked_PD.dtype, torch.float32))
        leaf_C, row_CD = self.rows.leaf.to(asked_PD.device), self.rows.row.to(asked_PD)
        logits_PC = asked_PD @ row_CD.T
        logits_PC = logits_PC.index_put(
            (self.prompt.to(state_PD.device), self.place.to(state_PD.device)),
            logits_PC.new_tensor(-torch.inf),
        )
        best_PV = select_top_k(logits_PC.detach(), min(self.width, len(leaf_C)))[1]
        chosen_PV = logits_PC.gather(1, best_PV)
        legal_PV = chosen_PV > -torch.inf
        vote_PV = chosen_PV.masked_fill(~legal_PV, -1e30).softmax(1)
        return leaf_C[best_PV].masked_fill(~legal_PV, -1), vote_PV.masked_fill(~legal_PV, 0.0)


def query(model: nn.Module, state_D: Tensor) -> Tensor:
    """Compute A h [..., D] of states."""
    return getattr(model, QUERY)(state_D)


def compute_nearest_loss(
    model: nn.Module,
    batch: SampleBatch,
    state_MD: Tensor,
    own_MD: Tensor,
    negative_key_n: Tensor,
    negative_nD: Tensor,
    items: int,
    weight_M: Tensor | None = None,
) -> Tensor:
    """Compute the sampled-softmax loss of the batch's targets, in summed nats, each predicted from the state before it.

    Negatives are drawn uniformly from the items, once for all targets, and each stands for items / n of them; a negative that
    equals the target counts nothing.

    Args:
        model: A model with a voter by nearness.
        batch: The batch that contains the targets.
        state_MD: State before each target.
        own_MD: Item row of each target.
        negative_key_n: Sparse keys of the negatives.
        negative_nD: Item rows of the negatives.
        items: Number of items that the negatives stand for.
        weight_M: Weight of each target; 1 by default.
    """
    asked_MD = query(model, state_MD)
    key_M = batch.context["item"].values[batch.loss_mask.values]
    own_M = (asked_MD * own_MD).sum(1)
    place_M = torch.searchsorted(negative_key_n, key_M).clamp_max(len(negative_key_n) - 1)
    drawn = (negative_key_n[place_M] == key_M).nonzero().squeeze(1)
    logits_Mn = (asked_MD @ negative_nD.T).index_put((drawn, place_M[drawn]), asked_MD.new_tensor(-torch.inf))
    others_M = logits_Mn.logsumexp(1) + math.log(items / len(negative_key_n))
    nats_M = torch.logaddexp(own_M, others_M) - own_M
    return (nats_M if weight_M is None else nats_M * weight_M).sum()
