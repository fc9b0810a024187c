"""SASRec's network: causal attention over a user's items, with shared input and output embeddings.

It follows Kang and McAuley (2018), but uses the blocks of `sid_decoder` with rotary positions. A start position precedes every
sequence, so an empty history has a state too. Sequences are packed without padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.models.sid_decoder import AttentionBlock, compute_rotary
from nonet.types import Jagged

# Shapes: B sequences, N events, T = N + B positions, M targets, n negatives, I items, D width.
_STD = 0.05  # Standard deviation of the initial item vectors.


class SasRecNet(nn.Module):
    """Computes states of packed histories; the item vectors [I, D] are input and output embeddings."""

    def __init__(self, items: int, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.item, self.start = nn.Embedding(items, width), nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.dropout, self._head_width = nn.LayerNorm(width), dropout, width // heads
        nn.init.normal_(self.item.weight, std=_STD)

    def forward(self, item: Jagged) -> Tensor:
        """Compute the state [T, D] at every position: at a sequence's start, then after each of its events."""
        offsets = item.offsets
        cuts_B1 = offsets + torch.arange(len(offsets))
        sequence_N = torch.repeat_interleave(offsets.diff())
        position_N = torch.arange(len(item.values)) + sequence_N + 1
        x_TD = self.start.expand(len(position_N) + len(item), -1)
        x_TD = x_TD.index_copy(0, position_N, self.item(item.values) * self.item.embedding_dim**0.5)
        position_T = torch.zeros(len(x_TD), dtype=torch.int64)
        position_T[position_N] = position_N - cuts_B1[sequence_N]
        x_TD = functional.dropout(x_TD, self.dropout, self.training)
        rotation = compute_rotary(position_T, self._head_width)
        for block in self.blocks:
            x_TD = block(x_TD, cuts_B1, rotation)
        return self.norm(x_TD)

    @torch.no_grad()
    def score_items(self, item: Jagged) -> Tensor:
        """Compute the logits [B, I] of the next item after each whole sequence."""
        state_BD = self(item)[item.offsets[1:] + torch.arange(len(item))]
        return state_BD @ self.item.weight.T

    def compute_loss(self, item: Jagged, target_N: Tensor, negative_n: Tensor | None) -> Tensor:
        """Compute the mean loss in nats of the target events, each predicted from the state before it.

        Without negatives the softmax is over all items. With negatives it is over the target and `n` distinct items, drawn
        uniformly and shared by all targets. Each negative has weight I / n (log-q correction), or 0 for targets that equal it.

        Args:
            item: Items of the packed histories.
            target_N: Mask of the events that are targets.
            negative_n: Negatives; None for all items.
        """
        sequence_N = torch.repeat_interleave(item.offsets.diff())
        before_M = (torch.arange(len(item.values)) + sequence_N)[target_N]
        state_MD, target_M = self(item)[before_M], item.values[target_N]
        if negative_n is None:
            return functional.cross_entropy(state_MD @ self.item.weight.T, target_M)
        column_I = torch.full((len(self.item.weight),), -1).index_copy(
            0, negative_n, torch.arange(len(negative_n))
        )
        column_M = column_I[target_M]
        sampled_rows = (column_M >= 0).nonzero().squeeze(1)
        logits_Mn = (state_MD @ self.item(negative_n).T).index_put(
            (sampled_rows, column_M[sampled_rows]), torch.tensor(-torch.inf)
        )
        negative_logit_M = logits_Mn.logsumexp(1) + math.log(len(self.item.weight) / len(negative_n))
        target_logit_M = (state_MD * self.item(target_M)).sum(1)
        return (torch.logaddexp(target_logit_M, negative_logit_M) - target_logit_M).mean()
