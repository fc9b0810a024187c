"""Nearest items: a second voter of a memory, which votes for the items whose rows are nearest to a user's state.

    s(y) = (A h) . r(y)

h is the state after a user's newest event, r(y) the item's row that is also its input embedding (tied, as in SASRec: Kang and
McAuley, 2018), and A a matrix of the model. A is trained together with the semantic ids by sampled softmax, whose
negatives stand for all items of training (log-q correction). The items with the highest s(y) then vote as
transitions do, so dense retrieval and generation are one distribution. Items without a training event get no such votes; they are
scored by their codes only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nonet.models.ranking import select_top_k
from nonet.types import Jagged, SampleBatch

# Shapes: P prompts, V votes, X votes of both voters, C items of training, n negatives, M targets, D width of a row.

QUERY = "nearest"
"""Name of the module A in a model whose memory has this voter."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows of the items that occur in training and are in the catalogue.

    Attributes:
        leaf: Leaves [C] int64 of the items, ascending.
        row: Embedding rows [C, D] of these items.
    """

    leaf: Tensor
    row: Tensor


@dataclass(frozen=True, slots=True)
class NearestItems:
    """The inputs of votes by nearness for P prompts, which are computed when the model's states are known.

    Attributes:
        rows: Rows of the items.
        hidden_prompt: Prompt [H] of each hidden (prompt, item) pair, which gets no vote.
        hidden_row: Index [H] in `rows` of the item of each hidden pair.
        width: Maximum number of items that get votes per prompt.
    """

    rows: ItemRows
    hidden_prompt: Tensor
    hidden_row: Tensor
    width: int

    @classmethod
    def of(cls, rows: ItemRows, leaf_of_item: np.ndarray, hidden: Jagged, width: int) -> NearestItems:
        """Build from item rows; `hidden` has the dense indices of the items that get no vote of each prompt."""
        leaf = torch.from_numpy(np.asarray(leaf_of_item)[hidden.values].astype(np.int64))
        prompt = torch.repeat_interleave(torch.from_numpy(np.diff(hidden.offsets)))
        row_index = torch.searchsorted(rows.leaf, leaf).clamp_max(max(0, len(rows.leaf) - 1))
        has_row = rows.leaf[row_index] == leaf if len(rows.leaf) else torch.zeros_like(leaf, dtype=torch.bool)
        return cls(rows, prompt[has_row], row_index[has_row], width)

    def compute_votes(self, model: nn.Module, state_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the leaves [P, V] and their votes [P, V], which sum to 1 per prompt; differentiable."""
        query_PD = query(model, state_PD)
        query_PD = query_PD.to(torch.promote_types(query_PD.dtype, torch.float32))
        leaf_C, row_CD = self.rows.leaf.to(query_PD.device), self.rows.row.to(query_PD)
        logits_PC = query_PD @ row_CD.T
        logits_PC = logits_PC.index_put(
            (self.hidden_prompt.to(state_PD.device), self.hidden_row.to(state_PD.device)),
            logits_PC.new_tensor(-torch.inf),
        )
        best_PV = select_top_k(logits_PC.detach(), min(self.width, len(leaf_C)))[1]
        best_logits_PV = logits_PC.gather(1, best_PV)
        legal_PV = best_logits_PV > -torch.inf
        vote_PV = best_logits_PV.masked_fill(~legal_PV, -1e30).softmax(1)
        return leaf_C[best_PV].masked_fill(~legal_PV, -1), vote_PV.masked_fill(~legal_PV, 0.0)


def query(model: nn.Module, state_D: Tensor) -> Tensor:
    """Compute the queries A h [..., D] of states h."""
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

    Negatives are drawn uniformly from `items` items, once for all targets, and each stands for items / n of them. A negative that
    equals the target is ignored.

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
    query_MD = query(model, state_MD)
    key_M = batch.context["item"].values[batch.loss_mask.values]
    target_logit_M = (query_MD * own_MD).sum(1)
    negative_M = torch.searchsorted(negative_key_n, key_M).clamp_max(len(negative_key_n) - 1)
    drawn_targets = (negative_key_n[negative_M] == key_M).nonzero().squeeze(1)
    logits_Mn = (query_MD @ negative_nD.T).index_put(
        (drawn_targets, negative_M[drawn_targets]), query_MD.new_tensor(-torch.inf)
    )
    negatives_logsumexp_M = logits_Mn.logsumexp(1) + math.log(items / len(negative_key_n))
    nats_M = torch.logaddexp(target_logit_M, negatives_logsumexp_M) - target_logit_M
    return (nats_M if weight_M is None else nats_M * weight_M).sum()
