"""Scores of every item of the catalogue, without a beam.

The constrained log-probability of an item is a sum over its path, so each inner node is evaluated once per user. A node with a
single child needs no evaluation, since its only code has probability 1. Only logits of legal codes are kept. If a model has
`compute_legal_logits`, it computes only once what does not depend on the user. Users are the last dimension in memory, so that a
sum over the children of a node adds whole vectors. Temporaries stay under `budget_bytes`, except those with the size of the
result, [U, I].
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
from nonet.models.generation.memory import VoteMixture, get_nearest_share
from nonet.models.generation.topk import select_top_k
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.types import Jagged

# Shapes: U users, I items, K codes; n nodes of a level, m of them with several children, c children of those.
_MAX_USERS = 256  # scored at once


@torch.no_grad()
def score_items(model: SidModel, cache: PromptCache, trie: Trie, *, budget_bytes: int = 32 << 20) -> Tensor:
    """Compute the log-probability [U, I] in nats of every item for every prompt in `cache`; -inf outside the catalogue.

    Prompts are processed in chunks by `cache.select_prompts`.
    """
    users, state = len(cache.state), cache.state
    levels = [_make_choices(trie, level, state.device) for level in range(trie.levels)]
    leaf_I = trie.get_tensor("leaf_of_item", 0, state.device)
    dtype = torch.promote_types(state.dtype, torch.float32)
    scores_UI = torch.empty(users, trie.n_items, dtype=dtype, device=state.device)
    for start in range(0, users, _MAX_USERS):
        part = cache if users <= _MAX_USERS else cache.select_prompts(start, min(start + _MAX_USERS, users))
        leaves_nU = _score_leaves(model, part, levels, dtype, budget_bytes)
        scores_UI[start : start + _MAX_USERS] = leaves_nU.index_select(0, leaf_I.clamp_min(0)).T
    return scores_UI.masked_fill_(leaf_I < 0, -torch.inf)


def mix_votes(
    model: nn.Module, trie: Trie, scores_UI: Tensor, votes: Votes, state_UD: Tensor | None = None
) -> Tensor:
    """Mix the model's scores [U, I] with votes; `state_UD` is needed for the votes of the nearest items."""
    if state_UD is not None:
        votes = votes.mix_nearest(model, state_UD, get_nearest_share(model))
    item_UV = trie.get_tensor("item_of_leaf", 0, scores_UI.device)[votes.leaf.clamp_min(0)].long()
    voted_scores_UV = scores_UI.gather(1, item_UV)
    mixture = VoteMixture.of(model, votes, voted_scores_UV)
    mixed_UI = scores_UI + torch.log1p(-mixture.share)[:, None]
    user, column = (votes.leaf >= 0).nonzero(as_tuple=True)
    mixed_UI[user, item_UV[user, column]] = mixture.mix(voted_scores_UV, mixture.q)[user, column]
    return mixed_UI


@dataclass(frozen=True, slots=True)
class _LevelChoices:
    """The nodes of one level of the trie that have several children.

    Attributes:
        level: The level.
        parent: Parent [n'] of every node of the next level.
        prefix: Codes [m, level] on the path to each node.
        row: Index [c] of each child's parent in `prefix`.
        code: Code [c] of each child.
        child: Node number [c] of each child on the next level.
        first: Offsets [m + 1] of the nodes' children in `row`, `code` and `child`.
    """

    level: int
    parent: Tensor
    prefix: Tensor
    row: Tensor
    code: Tensor
    child: Tensor
    first: Tensor

    def cut(self, start: int, stop: int) -> _LevelChoices:
        """Return the choices of the nodes [start, stop) of this object."""
        begin, end = int(self.first[start]), int(self.first[stop])
        return _LevelChoices(
            self.level,
            self.parent,
            self.prefix[start:stop],
            self.row[begin:end] - start,
            self.code[begin:end],
            self.child[begin:end],
            self.first[start : stop + 1] - begin,
        )

    def split(self, children: int) -> Iterator[_LevelChoices]:
        """Yield groups of nodes with at most `children` children in total, or single nodes that have more."""
        start, nodes = 0, len(self.prefix)
        while start < nodes:
            max_end = self.first[start] + children
            stop = max(start + 1, int(torch.searchsorted(self.first, max_end, right=True)) - 1)
            yield self if stop - start == nodes else self.cut(start, stop)
            start = stop


def _make_choices(trie: Trie, level: int, device: Any) -> _LevelChoices:
    """List the nodes of a level with more than one child, and their children."""
    first = trie.get_tensor("first_child", level, device)
    parent = torch.repeat_interleave(first.diff())
    branching = (first.diff() > 1).nonzero().squeeze(1)
    row, code, child = trie.list_children(level, branching)
    child_offsets = torch.nn.functional.pad((first[branching + 1] - first[branching]).cumsum(0), (1, 0))
    return _LevelChoices(
        level, parent, trie.decode_prefixes(level, branching), row, code, child, child_offsets
    )


def _score_leaves(
    model: SidModel, cache: PromptCache, levels: list[_LevelChoices], dtype: torch.dtype, budget_bytes: int
) -> Tensor:
    """Compute the log-probability [n_L, U] of every leaf."""
    users = len(cache.state)
    logp_nU = torch.zeros(1, users, dtype=dtype, device=cache.state.device)
    # A (user, child) pair takes up to 8 numbers: its logit, its copies for transposing and padding, exponents, its result.
    children = max(1, budget_bytes // (8 * logp_nU.element_size() * users))
    for level in levels:
        logp_nU = logp_nU.index_select(0, level.parent)
        for part in level.split(children):
            logits_Uc = None
            if _has_matching_legal_logits(model):
                logits_Uc = model.compute_legal_logits(cache, part.level, part.prefix, part.row, part.code)  # type: ignore[attr-defined]
            if logits_Uc is None:
                logits_Uc = _compute_step_logits(model, cache, part, dtype, budget_bytes)
            logp_nU.index_add_(0, part.child, _log_softmax(logits_Uc.T.to(dtype).contiguous(), part))
    return logp_nU


def _has_matching_legal_logits(model: SidModel) -> bool:
    """Return whether the model has a `compute_legal_logits` that matches its `step`.

    It does not match if a subclass overrides only `step`, and inherits `compute_legal_logits`.
    """
    defining_classes = [
        [depth for depth, cls in enumerate(type(model).__mro__) if name in vars(cls)]
        for name in ("compute_legal_logits", "step")
    ]
    return bool(defining_classes[0]) and defining_classes[0] <= defining_classes[1]


def _compute_step_logits(
    model: SidModel, cache: PromptCache, part: _LevelChoices, dtype: torch.dtype, budget_bytes: int
) -> Tensor:
    """Compute the logits [U, c] of the children from steps that return all codes."""
    users, codes = len(cache.state), model.codes[part.level]
    # A (user, node) pair takes the logits of all codes and the depth decoder's activations.
    pairs = max(1, budget_bytes // (4 * (4 * max(model.codes) + 16 * cache.state.shape[-1])))
    users_per_step, nodes = min(users, pairs), max(1, pairs // users)
    logits_Uc = torch.empty(users, len(part.row), dtype=dtype, device=cache.state.device)
    for user in range(0, users, users_per_step):
        part_cache = (
            cache
            if users_per_step == users
            else cache.select_prompts(user, min(user + users_per_step, users))
        )
        for start in range(0, len(part.prefix), nodes):
            stop = min(start + nodes, len(part.prefix))
            c = slice(int(part.first[start]), int(part.first[stop]))
            slot = (part.row[c] - start) * codes + part.code[c]
            prefix = part.prefix[start:stop].expand(len(part_cache.state), -1, -1)
            step = model.step(part_cache, prefix, part.level).flatten(1)
            logits_Uc[user : user + users_per_step, c] = step.index_select(1, slot).to(dtype)
    return logits_Uc


def _log_softmax(logits_cU: Tensor, part: _LevelChoices) -> Tensor:
    """Compute the log-softmax over the children of each node, [c, U].

    Nodes are processed in groups with 2, 3 to 4, 5 to 8, ... children; each group is padded to one tensor.
    """
    count_m = part.first.diff()
    total_mU = logits_cU.new_empty(len(count_m), logits_cU.shape[1])
    size, max_count = 2, int(count_m.max())
    while size < 2 * max_count:
        nodes = ((count_m <= size) & (count_m > size // 2)).nonzero().squeeze(1)
        index = torch.arange(size, device=nodes.device)
        is_padding = index >= count_m[nodes, None]
        child = (part.first[nodes, None] + index).masked_fill(is_padding, 0)
        block = logits_cU.index_select(0, child.flatten()).unflatten(0, child.shape)
        if bool(is_padding.any()):
            block.masked_fill_(is_padding[..., None], -torch.inf)
        total_mU.index_copy_(0, nodes, block.logsumexp(1))
        size *= 2
    return logits_cU - total_mU.index_select(0, part.row)


def select_top_items(scores_UI: Tensor, k: int, masked: Jagged, tie_I: np.ndarray | None = None) -> Tensor:
    """Select the k best items of each user that are not masked, [U, k] int64; -1 where none is left.

    Equal scores are ordered by `tie_I`, the rank that evaluation gives each item among items of equal score. If it is None, they
    are ordered by index.
    """
    unmasked_UI = scores_UI.clone()
    unmasked_UI[_list_masked_pairs(masked, scores_UI)] = -torch.inf
    order_I = torch.arange(unmasked_UI.shape[1]) if tie_I is None else torch.from_numpy(np.argsort(tie_I))
    order_I = order_I.to(unmasked_UI.device)
    values_Uk, place_Uk = select_top_k(unmasked_UI[:, order_I], k)
    index_Uk = order_I[place_Uk].masked_fill(values_Uk == -torch.inf, -1)
    return torch.nn.functional.pad(index_Uk, (0, k - index_Uk.shape[1]), value=-1)


def _list_masked_pairs(masked: Jagged, scores_UI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct (user, item) pairs of a Jagged of dense item indices."""
    users, items = scores_UI.shape
    offsets = torch.as_tensor(masked.offsets).to(scores_UI.device)
    if len(offsets) != users + 1:
        raise DataError(f"`masked` has {len(offsets) - 1} rows for {users} users; it needs one row per user.")
    user = torch.repeat_interleave(offsets.diff())
    pair = torch.unique(user * items + torch.as_tensor(masked.values).to(scores_UI.device).long())
    return pair // items, pair % items
