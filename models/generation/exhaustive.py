"""Scores of every item of the catalogue, without a beam.

The constrained log-probability of an item is a sum over its path, so each inner node is evaluated once per user. A node with a
single child needs no evaluation, since its only code has probability 1. Only logits of legal codes are stored. A model with
`compute_legal_logits` computes terms that do not depend on the user only once. Users are the last dimension in memory, so that a
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
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.models.ranking import select_top_k
from nonet.types import Jagged

# Shapes: U users (prompts), I items, V voted leaves, D width, K codes; n nodes of a level, m of them with several children, c
# children of those.
_MAX_PROMPTS = 256  # Prompts that are scored at once.


@torch.no_grad()
def score_items(model: SidModel, cache: PromptCache, trie: Trie, *, budget_bytes: int = 32 << 20) -> Tensor:
    """Compute the log-probability [U, I] in nats of every item for every prompt in `cache`; -inf outside the catalogue.

    `budget_bytes` limits the size of temporary tensors, except those as large as the result.
    """
    n_prompts, state = len(cache.state), cache.state
    levels = [_make_choices(trie, level, state.device) for level in range(trie.levels)]
    leaf_I = trie.get_tensor("leaf_of_item", 0, state.device)
    dtype = torch.promote_types(state.dtype, torch.float32)
    scores_UI = torch.empty(n_prompts, trie.n_items, dtype=dtype, device=state.device)
    for start in range(0, n_prompts, _MAX_PROMPTS):
        stop = min(start + _MAX_PROMPTS, n_prompts)
        part = cache if n_prompts <= _MAX_PROMPTS else cache.select_prompts(start, stop)
        logp_nU = _score_leaves(model, part, levels, dtype, budget_bytes)
        scores_UI[start : start + _MAX_PROMPTS] = logp_nU.index_select(0, leaf_I.clamp_min(0)).T
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
    user, vote_index = (votes.leaf >= 0).nonzero(as_tuple=True)
    mixed_UI[user, item_UV[user, vote_index]] = mixture.mix(voted_scores_UV, mixture.q)[user, vote_index]
    return mixed_UI


@dataclass(frozen=True, slots=True)
class _LevelChoices:
    """The nodes of one level of the trie that have several children.

    Attributes:
        level: The level.
        parent: Parent of every node of the next level, whatever its number of siblings.
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

    def slice_nodes(self, start: int, stop: int) -> _LevelChoices:
        """Return the choices of the nodes [start, stop), which are indices in `prefix`."""
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

    def split(self, max_children: int) -> Iterator[_LevelChoices]:
        """Yield groups of nodes with at most `max_children` children in total, or single nodes that have more."""
        start, n_nodes = 0, len(self.prefix)
        while start < n_nodes:
            last_offset = self.first[start] + max_children
            stop = max(start + 1, int(torch.searchsorted(self.first, last_offset, right=True)) - 1)
            yield self if stop - start == n_nodes else self.slice_nodes(start, stop)
            start = stop


def _make_choices(trie: Trie, level: int, device: Any) -> _LevelChoices:
    """List the nodes of a level with more than one child, and their children."""
    first_child = trie.get_tensor("first_child", level, device)
    parent = torch.repeat_interleave(first_child.diff())
    node_m = (first_child.diff() > 1).nonzero().squeeze(1)
    row, code, child = trie.list_children(level, node_m)
    child_offsets = torch.nn.functional.pad((first_child[node_m + 1] - first_child[node_m]).cumsum(0), (1, 0))
    return _LevelChoices(level, parent, trie.decode_prefixes(level, node_m), row, code, child, child_offsets)


def _score_leaves(
    model: SidModel,
    cache: PromptCache,
    choices_by_level: list[_LevelChoices],
    dtype: torch.dtype,
    budget_bytes: int,
) -> Tensor:
    """Compute the log-probability [n, U] of every leaf, where n is the number of leaves."""
    n_prompts = len(cache.state)
    logp_nU = torch.zeros(1, n_prompts, dtype=dtype, device=cache.state.device)
    # A (user, child) pair takes up to 8 numbers: its logit, its copies for transposing and padding, exponents, its result.
    max_children = max(1, budget_bytes // (8 * logp_nU.element_size() * n_prompts))
    for level_choices in choices_by_level:
        logp_nU = logp_nU.index_select(0, level_choices.parent)
        for group in level_choices.split(max_children):
            logits_Uc = None
            if _has_matching_legal_logits(model):
                compute: Any = model.compute_legal_logits  # type: ignore[attr-defined]
                logits_Uc = compute(cache, group.level, group.prefix, group.row, group.code)
            if logits_Uc is None:
                logits_Uc = _compute_step_logits(model, cache, group, dtype, budget_bytes)
            logp_nU.index_add_(0, group.child, _log_softmax(logits_Uc.T.to(dtype).contiguous(), group))
    return logp_nU


def _has_matching_legal_logits(model: SidModel) -> bool:
    """Return whether the model has a `compute_legal_logits` that matches its `step`.

    It does not match if a subclass overrides only `step`, and inherits `compute_legal_logits`.
    """
    # For each method, the indices of the classes that define it, in the method resolution order.
    defining_classes = [
        [depth for depth, cls in enumerate(type(model).__mro__) if name in vars(cls)]
        for name in ("compute_legal_logits", "step")
    ]
    return bool(defining_classes[0]) and defining_classes[0] <= defining_classes[1]


def _compute_step_logits(
    model: SidModel, cache: PromptCache, group: _LevelChoices, dtype: torch.dtype, budget_bytes: int
) -> Tensor:
    """Compute the logits [U, c] of the children by `step`, which returns the logits of all codes."""
    n_prompts, n_codes = len(cache.state), model.codes[group.level]
    # A (user, node) pair takes the logits of all codes and the depth decoder's activations.
    max_pairs = max(1, budget_bytes // (4 * (4 * max(model.codes) + 16 * cache.state.shape[-1])))
    prompts_per_step, nodes_per_step = min(n_prompts, max_pairs), max(1, max_pairs // n_prompts)
    logits_Uc = torch.empty(n_prompts, len(group.row), dtype=dtype, device=cache.state.device)
    for first_prompt in range(0, n_prompts, prompts_per_step):
        prompts = (
            cache
            if prompts_per_step == n_prompts
            else cache.select_prompts(first_prompt, min(first_prompt + prompts_per_step, n_prompts))
        )
        for start in range(0, len(group.prefix), nodes_per_step):
            stop = min(start + nodes_per_step, len(group.prefix))
            children = slice(int(group.first[start]), int(group.first[stop]))
            columns = (group.row[children] - start) * n_codes + group.code[children]
            prefix = group.prefix[start:stop].expand(len(prompts.state), -1, -1)
            logits_UC = model.step(prompts, prefix, group.level).flatten(1)
            rows = slice(first_prompt, first_prompt + prompts_per_step)
            logits_Uc[rows, children] = logits_UC.index_select(1, columns).to(dtype)
    return logits_Uc


def _log_softmax(logits_cU: Tensor, group: _LevelChoices) -> Tensor:
    """Compute the log-softmax [c, U] of logits over the children of each node.

    Nodes are processed in groups with 2, 3 to 4, 5 to 8, ... children; each group is padded to one tensor.
    """
    n_children_m = group.first.diff()
    logsumexp_mU = logits_cU.new_empty(len(n_children_m), logits_cU.shape[1])
    padded_count, max_children = 2, int(n_children_m.max())
    while padded_count < 2 * max_children:
        nodes = ((n_children_m <= padded_count) & (n_children_m > padded_count // 2)).nonzero().squeeze(1)
        index = torch.arange(padded_count, device=nodes.device)
        is_padding = index >= n_children_m[nodes, None]
        child = (group.first[nodes, None] + index).masked_fill(is_padding, 0)
        block = logits_cU.index_select(0, child.flatten()).unflatten(0, child.shape)
        if bool(is_padding.any()):
            block.masked_fill_(is_padding[..., None], -torch.inf)
        logsumexp_mU.index_copy_(0, nodes, block.logsumexp(1))
        padded_count *= 2
    return logits_cU - logsumexp_mU.index_select(0, group.row)


def select_top_items(scores_UI: Tensor, k: int, masked: Jagged, tie_I: np.ndarray | None = None) -> Tensor:
    """Return the k best items [U, k] int64 of each user that are not masked, best first; -1 where none is left.

    Items of equal score are ordered by their values in `tie_I`, or by index if it is None.
    """
    unmasked_UI = scores_UI.clone()
    unmasked_UI[_list_masked_pairs(masked, scores_UI)] = -torch.inf
    order_I = torch.arange(unmasked_UI.shape[1]) if tie_I is None else torch.from_numpy(np.argsort(tie_I))
    order_I = order_I.to(unmasked_UI.device)
    values_Uk, rank_Uk = select_top_k(unmasked_UI[:, order_I], k)
    index_Uk = order_I[rank_Uk].masked_fill(values_Uk == -torch.inf, -1)
    return torch.nn.functional.pad(index_Uk, (0, k - index_Uk.shape[1]), value=-1)


def _list_masked_pairs(masked: Jagged, scores_UI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct (user, item) pairs, as users and items, of a Jagged with one row of dense item indices per user."""
    n_users, n_items = scores_UI.shape
    offsets = torch.as_tensor(masked.offsets).to(scores_UI.device)
    if len(offsets) != n_users + 1:
        raise DataError(
            f"`masked` has {len(offsets) - 1} rows for {n_users} users; it needs one row per user."
        )
    user = torch.repeat_interleave(offsets.diff())
    pair = torch.unique(user * n_items + torch.as_tensor(masked.values).to(scores_UI.device).long())
    return pair // n_items, pair % n_items
