"""Beam search over the catalogue: the W best legal, distinct items per user, best first.

The history is read once (`prefill`); each level costs one `step` over the live beams. Scores are sums of constrained
log-probabilities: at every node the model is renormalised over *all* codes that lead to an item of the catalogue. Forbidden
items stay in that normalisation and are only excluded from the beam, so a beam's log-probability is the same number with and
without them, and the same as in `log_prob`. Equal scores are ordered by parent * K + code.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models import PromptCache, SidModel
from nonet.models.generation.logprob import legal_log_softmax
from nonet.models.generation.memory import remember
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.models.ranking import select_top_k
from nonet.types import Jagged

# Shapes: U users (prompts), W requested beams, V beams of a level (1 at the root, then up to W), L levels, K codes of the level,
# C sub-catalogues, I items, N nodes of a level, X leaves per prompt, F forbidden (user, leaf) pairs, D (user, node) pairs.


@dataclass(frozen=True, slots=True)
class Beams:
    """The recommended items of each user, best first.

    Where a user has fewer than W items left, the last entries have valid False, item -1, sid -1 and logp 0.

    Attributes:
        item: Dense item indices [U, W] int64.
        sid: Semantic ids [U, W, L] int64.
        logp: Log-probabilities per level [U, W, L] in nats.
        valid: Mask [U, W] of the beams that hold an item.
    """

    item: Tensor
    sid: Tensor
    logp: Tensor
    valid: Tensor


class SubCatalogue:
    """The items of a catalogue that may be recommended, such as those in stock or of a scene, as masks over the unchanged trie.

    Log-probabilities stay normalised over the whole catalogue, as with forbidden items.

    Args:
        trie: The trie of the whole catalogue.
        allowed_CI: Mask of the items (dense index) of each of C sub-catalogues.
        which_U: Index of the sub-catalogue of each prompt; by default 0 for all.
    """

    def __init__(self, trie: Trie, allowed_CI: np.ndarray, which_U: np.ndarray | None = None):
        self._trie, self._allowed_CI = trie, np.asarray(allowed_CI, bool)
        self._excluded_leaves_CI = torch.from_numpy(~self._allowed_CI[:, np.asarray(trie.item_of_leaf)])
        self._which_U = which_U
        self._excluded_counts: dict[tuple[int, str], Tensor] = {}
        self._dead_nodes: dict[tuple[int, str], Tensor] = {}

    def select_prompts(self, which_U: np.ndarray) -> SubCatalogue:
        """Return a copy that shares the masks, for prompts whose sub-catalogues are `which_U`."""
        other = copy.copy(self)
        other._which_U = np.asarray(which_U)
        return other

    def list_excluded_items(self, prompts: int) -> list[np.ndarray]:
        """Return for each prompt the dense indices of the items that are excluded."""
        excluded_items = [np.flatnonzero(~allowed_I) for allowed_I in self._allowed_CI]
        return [excluded_items[which] for which in self._get_sub_catalogue_index(prompts, "cpu").tolist()]

    def mask_excluded(self, leaf_UX: Tensor) -> Tensor:
        """Return a mask [U, X] of the leaves that their prompt's sub-catalogue excludes."""
        excluded_leaf_CN = self._excluded_leaves_CI.to(leaf_UX.device)
        return excluded_leaf_CN[self._get_sub_catalogue_index(len(leaf_UX), leaf_UX.device)[:, None], leaf_UX]

    def mask_excluded_pairs(self, user_F: Tensor, leaf_F: Tensor, prompts: int) -> Tensor:
        """Return a mask [F] of the (prompt, leaf) pairs in which the prompt's sub-catalogue excludes the leaf."""
        return self._excluded_leaves_CI.to(leaf_F.device)[
            self._get_sub_catalogue_index(prompts, leaf_F.device)[user_F], leaf_F
        ]

    def mask_complete(
        self, level: int, user_D: Tensor, node_D: Tensor, count_D: Tensor, prompts: int
    ) -> Tensor:
        """Return a mask [D] of the (prompt, node) pairs below which the sub-catalogue has exactly `count_D` leaves."""
        which_D = self._get_sub_catalogue_index(prompts, node_D.device)[user_D]
        closed_D = self._count_excluded(level, node_D.device)[which_D, node_D].long()
        return count_D == self._trie.count_leaves(level, node_D) - closed_D

    def mask_dead_nodes(self, level: int, node_UVK: Tensor) -> Tensor:
        """Return a mask [U, V, K] of the nodes of a level below which the prompt's sub-catalogue has no item."""
        key = level, str(node_UVK.device)
        if key not in self._dead_nodes:
            excluded_CN = self._count_excluded(level, node_UVK.device)
            all_nodes_N = torch.arange(excluded_CN.shape[1], device=node_UVK.device)
            n_leaves_N = self._trie.count_leaves(level, all_nodes_N)
            self._dead_nodes[key] = excluded_CN if level == self._trie.levels else excluded_CN == n_leaves_N
        return self._dead_nodes[key][
            self._get_sub_catalogue_index(len(node_UVK), node_UVK.device)[:, None, None], node_UVK
        ]

    @property
    def nbytes(self) -> int:
        """Size of the masks in bytes; those that are cached under several keys count once."""
        bytes_by_id = {
            id(mask): mask.nbytes
            for mask in (
                self._excluded_leaves_CI,
                *self._excluded_counts.values(),
                *self._dead_nodes.values(),
            )
        }
        return self._allowed_CI.nbytes + sum(bytes_by_id.values())

    def _count_excluded(self, level: int, device: Any) -> Tensor:
        """Count the excluded leaves [C, N] below each node of a level; at the leaf level, return the mask of excluded leaves."""
        key = level, str(device)
        if key not in self._excluded_counts:
            excluded_CN = self._excluded_leaves_CI
            if level < self._trie.levels:
                cumulative = torch.nn.functional.pad(excluded_CN.cumsum(1, dtype=torch.int32), (1, 0))
                first_leaf = self._trie.get_tensor("first_leaf", level).long()
                excluded_CN = cumulative[:, first_leaf[1:]] - cumulative[:, first_leaf[:-1]]
            self._excluded_counts[key] = excluded_CN.to(device)
        return self._excluded_counts[key]

    def _get_sub_catalogue_index(self, prompts: int, device: Any) -> Tensor:
        """Return the index [U] of the sub-catalogue of each prompt."""
        if self._which_U is None:
            return torch.zeros(prompts, dtype=torch.int64, device=device)
        return torch.from_numpy(self._which_U).to(device)


@torch.no_grad()
def search_beams(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    width: int,
    *,
    forbidden: Jagged | None = None,
    votes: Votes | None = None,
    within: SubCatalogue | None = None,
) -> Beams:
    """Find the `width` best items of each prompt in `cache`.

    A prefix with only forbidden items below it is never entered, so `width` items are returned whenever the catalogue has that
    many allowed ones.

    Args:
        model: The model.
        cache: What the model's `prefill` returned.
        trie: The catalogue.
        width: Number of items per prompt.
        forbidden: Dense indices of the items that each prompt must not get.
        votes: Votes of the memory. With them, the best items by the mixture are selected from the model's beams and the voted
            leaves.
        within: Sub-catalogues that the items of each prompt must belong to.
    """
    if width < 1:
        raise ConfigError(f"beam width is {width}; it must be at least 1.")
    n_prompts, device = len(cache.state), cache.state.device
    forbidden_nodes = (
        _find_forbidden_nodes(trie, forbidden, n_prompts, device, within) if forbidden is not None else {}
    )
    node_UV = torch.zeros(n_prompts, 1, dtype=torch.int64, device=device)
    score_UV = torch.zeros(n_prompts, 1, device=device)
    sid_UVl = torch.zeros(n_prompts, 1, 0, dtype=torch.int64, device=device)
    logp_UVl = torch.zeros(n_prompts, 1, 0, device=device)
    for level in range(trie.levels):
        child_UVK = trie.find_children(level, node_UV)
        logp_UVK = legal_log_softmax(model.step(cache, sid_UVl, level), child_UVK >= 0)
        total_UVK = score_UV.unsqueeze(-1) + logp_UVK
        if within is not None:
            total_UVK = total_UVK.masked_fill(
                within.mask_dead_nodes(level + 1, child_UVK.clamp_min(0)), -torch.inf
            )
        if level + 1 in forbidden_nodes:
            _mask_forbidden_nodes(total_UVK, trie, level, node_UV, *forbidden_nodes[level + 1])
        n_codes = total_UVK.shape[-1]
        score_UV, flat_UV = select_top_k(total_UVK.flatten(1), width)
        parent_UV = flat_UV // n_codes
        # A dead beam, whose score is -inf, continues at node 0.
        node_UV = child_UVK.flatten(1).gather(1, flat_UV).clamp_min(0)
        sid_UVl = _append_level(sid_UVl, parent_UV, flat_UV % n_codes)
        logp_UVl = _append_level(logp_UVl, parent_UV, logp_UVK.flatten(1).gather(1, flat_UV))
    if votes is not None:
        score_UV, node_UV, sid_UVl, logp_UVl = _merge_voted_leaves(
            model, cache, trie, width, votes, (score_UV, node_UV, logp_UVl), within
        )
    return _make_beams(trie, width, score_UV, node_UV, sid_UVl, logp_UVl)


def _merge_voted_leaves(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    width: int,
    votes: Votes,
    beams: tuple[Tensor, Tensor, Tensor],
    within: SubCatalogue | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the best of the model's beams and the voted leaves by their log-probability under the mixture.

    `beams` are scores [U, V], leaves [U, V] and log-probabilities by level [U, V, L]. The result is scores, leaves, SIDs
    [U, W, L] and log-probabilities by level.
    """
    score_UV, leaf_UV, logp_UVL = beams
    mixture, voted_logp_UVL, _ = remember(model, cache, trie, votes)
    votes = mixture.votes  # including those of the nearest items
    # Beams that repeat a voted leaf or are dead are left out.
    is_dropped_UV = (leaf_UV[:, :, None] == votes.leaf[:, None, :]).any(-1) | (score_UV == -torch.inf)
    leaf_UX = torch.cat([leaf_UV, votes.leaf.clamp_min(0)], 1)
    excluded_UX = torch.cat([is_dropped_UV, votes.leaf < 0], 1)
    if within is not None:
        excluded_UX = excluded_UX | within.mask_excluded(leaf_UX)
    level_logp_UXL = torch.cat([logp_UVL.masked_fill(is_dropped_UV.unsqueeze(-1), 0.0), voted_logp_UVL], 1)
    level_logp_UXL = mixture.mix_levels(trie, leaf_UX, level_logp_UXL)
    total_UX = level_logp_UXL.sum(-1).masked_fill(excluded_UX, -torch.inf)
    score_UW, best_UW = select_top_k(total_UX, width)
    leaf_UW = leaf_UX.gather(1, best_UW)
    logp_UWL = level_logp_UXL.gather(1, best_UW.unsqueeze(-1).expand(-1, -1, level_logp_UXL.shape[-1]))
    sid_UWL = trie.decode_prefixes(trie.levels, leaf_UW.flatten()).unflatten(0, leaf_UW.shape)
    return score_UW, leaf_UW, sid_UWL, logp_UWL


def _append_level(prefix_UVl: Tensor, parent_UV: Tensor, new_value_UV: Tensor) -> Tensor:
    """Return [U, V, l + 1]: the values of all levels of each beam's parent, and the beam's own value of the new level."""
    index = parent_UV.unsqueeze(-1).expand(-1, -1, prefix_UVl.shape[-1])
    return torch.cat([prefix_UVl.gather(1, index), new_value_UV.unsqueeze(-1)], -1)


def _make_beams(trie: Trie, width: int, score: Tensor, leaf: Tensor, sid: Tensor, logp: Tensor) -> Beams:
    """Build the result of a search from sorted beams: look up items, mark dead beams as invalid, and pad to `width`."""
    valid = score > -torch.inf
    item = trie.get_tensor("item_of_leaf", 0, leaf.device)[leaf].long().masked_fill(~valid, -1)
    sid = sid.masked_fill(~valid.unsqueeze(-1), -1)
    logp = logp.masked_fill(~valid.unsqueeze(-1), 0.0)
    n_padding = width - item.shape[1]  # positive if there are fewer codes than beams
    if n_padding > 0:
        pad = torch.nn.functional.pad
        item, valid = pad(item, (0, n_padding), value=-1), pad(valid, (0, n_padding), value=False)
        sid, logp = pad(sid, (0, 0, 0, n_padding), value=-1), pad(logp, (0, 0, 0, n_padding))
    return Beams(item, sid, logp, valid)


def _find_forbidden_nodes(
    trie: Trie, forbidden: Jagged, n_prompts: int, device: Any, within: SubCatalogue | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Find by level the (user, node) pairs below which all items, or all of the sub-catalogue, are forbidden: user [D], node [D].

    Forbidden leaves are sorted, so those below one node are adjacent and counting them is a run-length count. The work is
    O(F log F) for F forbidden items, whatever the size of the catalogue.
    """
    user_F, leaf_F = _find_forbidden_leaves(trie, forbidden, n_prompts, device)
    if within is not None:
        is_allowed_F = ~within.mask_excluded_pairs(user_F, leaf_F, n_prompts)
        user_F, leaf_F = user_F[is_allowed_F], leaf_F[is_allowed_F]
    forbidden_nodes = {}
    for level in range(1, trie.levels + 1):
        node_F, n_nodes = trie.find_nodes(level, leaf_F), trie.n_nodes[level]
        pair_D, n_forbidden_D = torch.unique_consecutive(user_F * n_nodes + node_F, return_counts=True)
        user_D, node_D = pair_D // n_nodes, pair_D % n_nodes
        n_leaves_D = trie.count_leaves(level, node_D)
        is_complete_D = (
            n_forbidden_D == n_leaves_D
            if within is None
            else within.mask_complete(level, user_D, node_D, n_forbidden_D, n_prompts)
        )
        if bool(is_complete_D.any()):
            forbidden_nodes[level] = (user_D[is_complete_D], node_D[is_complete_D])
    return forbidden_nodes


def _find_forbidden_leaves(
    trie: Trie, forbidden: Jagged, n_prompts: int, device: Any
) -> tuple[Tensor, Tensor]:
    """Return the distinct forbidden (user, leaf) pairs, user [F] and leaf [F], ordered by user and leaf.

    Items outside the catalogue are dropped.
    """
    offsets = torch.as_tensor(forbidden.offsets).to(device)
    if len(offsets) != n_prompts + 1:
        raise ConfigError(
            f"`forbidden` has {len(offsets) - 1} rows for {n_prompts} prompts; it needs a row a prompt."
        )
    item = torch.as_tensor(forbidden.values).to(device).long()
    user = torch.repeat_interleave(offsets.diff())
    leaf = trie.get_tensor("leaf_of_item", 0, device)[item].long()
    pair = torch.unique((user * trie.n_leaves + leaf)[leaf >= 0])
    return pair // trie.n_leaves, pair % trie.n_leaves


def _mask_forbidden_nodes(
    total_UVK: Tensor, trie: Trie, level: int, node_UV: Tensor, user_D: Tensor, child_D: Tensor
) -> None:
    """Set to -inf, in place, the scores of the children `child_D` of user `user_D`, wherever their parent is in the beam."""
    parent_D = trie.find_parents(level, child_D)
    code_D = trie.get_tensor("code", level, node_UV.device)[child_D].long()
    dead_pair, beam = (node_UV[user_D] == parent_D.unsqueeze(-1)).nonzero(as_tuple=True)
    total_UVK[user_D[dead_pair], beam, code_D[dead_pair]] = -torch.inf
