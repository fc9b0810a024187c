"""Score every item of the catalogue, without a beam.

The constrained log-probability of an item is a sum over its path, so each inner node is evaluated once a
user: U * n depth steps, n = inner nodes with a choice. A node with a single child costs nothing: its only
code has probability 1. Temporaries stay under `budget_bytes`; the answer itself is [U, I].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nonet.errors import DataError
from nonet.models import PromptCache, SidModel
from nonet.models.generation.logprob import legal_log_softmax
from nonet.models.generation.memory import Memory
from nonet.models.generation.topk import top_k
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.types import Jagged

# Shapes: U users, I items, K codes; n nodes of a level, m of them with a choice, c children
# of those.


@torch.no_grad()
def score_items(model: SidModel, cache: PromptCache, trie: Trie, *, budget_bytes: int = 32 << 20) -> Tensor:
    """Log-probability [U, I] of every item for every prompt in `cache`, nats; -inf outside the catalogue.

    Prompts are taken a few at a time: `cache.part(start, stop)`.
    """
    users, device = len(cache.state), cache.state.device
    levels = [_choices(trie, level, device) for level in range(trie.levels)]
    leaf_I = trie.tensor("leaf_of_item", 0, device)
    # Held at a time by one (user, node) pair: logits, their softmax, and the depth decoder's activations.
    pairs = max(1, budget_bytes // (4 * (4 * max(trie.codes) + 16 * cache.state.shape[-1])))
    most = max(len(level.prefix) for level in levels)
    step = max(1, pairs // max(1, most))
    scores_UI = cache.state.new_empty(users, trie.n_items)
    for start in range(0, users, step):
        part = cache.part(start, min(start + step, users))
        leaves = _score_leaves(model, part, levels, max(1, pairs // len(part.state)))
        scores_UI[start : start + step] = leaves[:, leaf_I.clamp_min(0)]
    return scores_UI.masked_fill_(leaf_I < 0, -torch.inf)


def with_votes(model: nn.Module, trie: Trie, scores_UI: Tensor, votes: Votes) -> Tensor:
    """The scores [U, I] of the model's mixture with its memory, from the model's own."""
    item_UV = trie.tensor("item_of_leaf", 0, scores_UI.device)[votes.leaf.clamp_min(0)]
    return Memory.of(model, votes, scores_UI.gather(1, item_UV)).items(trie, scores_UI)


@dataclass(frozen=True, slots=True)
class _Choices:
    """One level of the trie, as the scorer walks it.

    parent [n'] of every node of the next level. Of the m nodes with a choice: prefix [m, level], and their
    children slot [c] = row * K + code and child [c], those of one node between first[i] and first[i + 1].
    """

    parent: Tensor
    prefix: Tensor
    slot: Tensor
    child: Tensor
    first: Tensor
    codes: int

    def parts(self, nodes: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Prefix, slot and child of `nodes` nodes at a time."""
        for start in range(0, len(self.prefix), nodes):
            stop = min(start + nodes, len(self.prefix))
            children = slice(int(self.first[start]), int(self.first[stop]))
            yield self.prefix[start:stop], self.slot[children] - start * self.codes, self.child[children]


def _choices(trie: Trie, level: int, device: Any) -> _Choices:
    first = trie.tensor("first_child", level, device)
    parent = torch.repeat_interleave(first.diff())
    chosen = (first.diff() > 1).nonzero().squeeze(1)
    row, code, child = trie.ragged_children(level, chosen)
    begins = torch.nn.functional.pad((first[chosen + 1] - first[chosen]).cumsum(0), (1, 0))
    return _Choices(
        parent, trie.prefixes(level, chosen), row * trie.codes[level] + code, child, begins, trie.codes[level]
    )


def _score_leaves(model: SidModel, cache: PromptCache, levels: list[_Choices], nodes: int) -> Tensor:
    """Log-probability [U, n_L] of every leaf."""
    users = len(cache.state)
    logp_Un = cache.state.new_zeros(users, 1)
    for number, level in enumerate(levels):
        logp_Un = logp_Un[:, level.parent]
        for prefix, slot, child in level.parts(nodes):
            legal_mK = torch.zeros(len(prefix) * level.codes, dtype=torch.bool, device=prefix.device)
            legal_mK[slot] = True
            logits_UmK = model.step(cache, prefix.expand(users, -1, -1), number)
            step_UmK = legal_log_softmax(logits_UmK, legal_mK.view(-1, level.codes))
            logp_Un.index_add_(1, child, step_UmK.flatten(1)[:, slot].to(logp_Un.dtype))
    return logp_Un


def top_items(scores_UI: Tensor, k: int, masked: Jagged, tie_I: np.ndarray | None = None) -> Tensor:
    """The k best items of each user that are not masked, [U, k] int64; -1 where none is left.

    Equal scores stand by `tie_I` (a place an item, as ranks have it), without it by index.
    """
    left_UI = scores_UI.clone()
    left_UI[_pairs(masked, scores_UI)] = -torch.inf
    order_I = torch.arange(left_UI.shape[1]) if tie_I is None else torch.from_numpy(np.argsort(tie_I))
    order_I = order_I.to(left_UI.device)
    values_Uk, place_Uk = top_k(left_UI[:, order_I], k)
    index_Uk = order_I[place_Uk].masked_fill(values_Uk == -torch.inf, -1)
    return torch.nn.functional.pad(index_Uk, (0, k - index_Uk.shape[1]), value=-1)


def _pairs(masked: Jagged, scores_UI: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct (user, item) pairs of a Jagged of dense item indices."""
    users, items = scores_UI.shape
    offsets = torch.as_tensor(masked.offsets).to(scores_UI.device)
    if len(offsets) != users + 1:
        raise DataError(f"`masked` has {len(offsets) - 1} rows for {users} users; it needs a row a user.")
    user = torch.repeat_interleave(offsets.diff())
    pair = torch.unique(user * items + torch.as_tensor(masked.values).to(scores_UI.device).long())
    return pair // items, pair % items
