"""Beam search over the catalogue: the W best legal, distinct items per user, best first.

The history is read once (`prefill`); each level costs one `step` over the live beams. Scores are sums of constrained
log-probabilities: at every node the model is renormalised over *all* codes that lead to an item of the catalogue. Forbidden
items stay in that normalisation and are only excluded from the beam, so a beam's log-probability is the same number with and
without them, and the same as in `log_prob`. Ties go to the lower flat index parent * K + code.
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
from nonet.models.generation.topk import select_top_k
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.types import Jagged

# Shapes: U users, W beams asked for, V beams alive at a level (1, then up to W), L levels, K codes of the
# level.


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
        which_U: The sub-catalogue of each prompt; by default the first.
    """

    def __init__(self, trie: Trie, allowed_CI: np.ndarray, which_U: np.ndarray | None = None):
        self._trie, self._allowed_CI = trie, np.asarray(allowed_CI, bool)
        self._out_CI = torch.from_numpy(~self._allowed_CI[:, np.asarray(trie.item_of_leaf)])
        self._which_U = which_U
        self._closed: dict[tuple[int, str], Tensor] = {}
        self._dead: dict[tuple[int, str], Tensor] = {}

    def select_prompts(self, which_U: np.ndarray) -> SubCatalogue:
        """Return the same masks for other prompts."""
        other = copy.copy(self)
        other._which_U = np.asarray(which_U)
        return other

    def list_excluded_items(self, prompts: int) -> list[np.ndarray]:
        """Return for each prompt the dense indices of the items that are excluded."""
        out = [np.flatnonzero(~allowed_I) for allowed_I in self._allowed_CI]
        return [out[which] for which in self._get_sub_catalogue_index(prompts, "cpu").tolist()]

    def mask_excluded(self, leaf_UX: Tensor) -> Tensor:
        """Return a mask [U, X] of the leaves that are excluded for their prompt."""
        out_CI = self._out_CI.to(leaf_UX.device)
        return out_CI[self._get_sub_catalogue_index(len(leaf_UX), leaf_UX.device)[:, None], leaf_UX]

    def mask_excluded_pairs(self, user_F: Tensor, leaf_F: Tensor, prompts: int) -> Tensor:
        """Return a mask [F] of the (prompt, leaf) pairs that are excluded."""
        return self._out_CI.to(leaf_F.device)[
            self._get_sub_catalogue_index(prompts, leaf_F.device)[user_F], leaf_F
        ]

    def are_all(self, level: int, user_D: Tensor, node_D: Tensor, count_D: Tensor, prompts: int) -> Tensor:
        """Return a mask [D]: whether `count_D` leaves are all that the prompts may get below the nodes of a level."""
        which_D = self._get_sub_catalogue_index(prompts, node_D.device)[user_D]
        closed_D = self._count_excluded(level, node_D.device)[which_D, node_D].long()
        return count_D == self._trie.count_leaves(level, node_D) - closed_D

    def mask_dead_nodes(self, level: int, node_UVK: Tensor) -> Tensor:
        """Return a mask of the nodes of a level that lead to no item that their prompt may get."""
        key = level, str(node_UVK.device)
        if key not in self._dead:
            closed_CN = self._count_excluded(level, node_UVK.device)
            every_N = torch.arange(closed_CN.shape[1], device=node_UVK.device)
            below = self._trie.count_leaves(level, every_N)
            self._dead[key] = closed_CN if level == self._trie.levels else closed_CN == below
        return self._dead[key][
            self._get_sub_catalogue_index(len(node_UVK), node_UVK.device)[:, None, None], node_UVK
        ]

    @property
    def nbytes(self) -> int:
        """Size of the masks in bytes."""
        kept = {
            id(mask): mask.nbytes for mask in (self._out_CI, *self._closed.values(), *self._dead.values())
        }
        return self._allowed_CI.nbytes + sum(kept.values())

    def _count_excluded(self, level: int, device: Any) -> Tensor:
        """Count the excluded leaves below each node of a level; at the leaf level, return the mask of excluded leaves."""
        key = level, str(device)
        if key not in self._closed:
            closed = self._out_CI
            if level < self._trie.levels:
                total = torch.nn.functional.pad(closed.cumsum(1, dtype=torch.int32), (1, 0))
                first = self._trie.get_tensor("first_leaf", level).long()
                closed = total[:, first[1:]] - total[:, first[:-1]]
            self._closed[key] = closed.to(device)
        return self._closed[key]

    def _get_sub_catalogue_index(self, prompts: int, device: Any) -> Tensor:
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
        forbidden: Dense indices of the items that a user must not get.
        votes: Votes of the memory; the items are then the best of the mixture, among the model's own beams and the voted leaves.
        within: The sub-catalogue that items must belong to.
    """
    if width < 1:
        raise ConfigError(f"beam width is {width}; it must be at least 1.")
    users, device = len(cache.state), cache.state.device
    dead = _find_dead_nodes(trie, forbidden, users, device, within) if forbidden is not None else {}
    node_UV = torch.zeros(users, 1, dtype=torch.int64, device=device)
    score_UV = torch.zeros(users, 1, device=device)
    sid_UVl = torch.zeros(users, 1, 0, dtype=torch.int64, device=device)
    logp_UVl = torch.zeros(users, 1, 0, device=device)
    for level in range(trie.levels):
        child_UVK = trie.find_children(level, node_UV)
        logp_UVK = legal_log_softmax(model.step(cache, sid_UVl, level), child_UVK >= 0)
        total_UVK = score_UV.unsqueeze(-1) + logp_UVK
        if within is not None:
            total_UVK = total_UVK.masked_fill(
                within.mask_dead_nodes(level + 1, child_UVK.clamp_min(0)), -torch.inf
            )
        if level + 1 in dead:
            _mask_dead_nodes(total_UVK, trie, level, node_UV, *dead[level + 1])
        codes = total_UVK.shape[-1]
        score_UV, flat_UV = select_top_k(total_UVK.flatten(1), width)
        parent_UV = flat_UV // codes
        node_UV = (
            child_UVK.flatten(1).gather(1, flat_UV).clamp_min(0)
        )  # a dead beam (-inf) follows the first node
        sid_UVl = _extend(sid_UVl, parent_UV, flat_UV % codes)
        logp_UVl = _extend(logp_UVl, parent_UV, logp_UVK.flatten(1).gather(1, flat_UV))
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
    """Select the best of the model's beams (score [U, V], leaf, logp by level) and the voted leaves by their mixture."""
    score_UV, leaf_UV, logp_UVL = beams
    memory, voted_UVL, _ = remember(model, cache, trie, votes)
    votes = memory.votes
    again_UV = (leaf_UV[:, :, None] == votes.leaf[:, None, :]).any(-1) | (score_UV == -torch.inf)
    leaf_UX = torch.cat([leaf_UV, votes.leaf.clamp_min(0)], 1)
    gone_UX = torch.cat([again_UV, votes.leaf < 0], 1)
    if within is not None:
        gone_UX = gone_UX | within.mask_excluded(leaf_UX)
    level_UXL = torch.cat([logp_UVL.masked_fill(again_UV.unsqueeze(-1), 0.0), voted_UVL], 1)
    level_UXL = memory.mix_levels(trie, leaf_UX, level_UXL)
    total_UX = level_UXL.sum(-1).masked_fill(gone_UX, -torch.inf)
    score_UW, best_UW = select_top_k(total_UX, width)
    leaf_UW = leaf_UX.gather(1, best_UW)
    logp_UWL = level_UXL.gather(1, best_UW.unsqueeze(-1).expand(-1, -1, level_UXL.shape[-1]))
    sid_UWL = trie.decode_prefixes(trie.levels, leaf_UW.flatten()).unflatten(0, leaf_UW.shape)
    return score_UW, leaf_UW, sid_UWL, logp_UWL


def _extend(prefix_UVl: Tensor, parent_UV: Tensor, last_UV: Tensor) -> Tensor:
    """Append one more level to the values of the parents."""
    index = parent_UV.unsqueeze(-1).expand(-1, -1, prefix_UVl.shape[-1])
    return torch.cat([prefix_UVl.gather(1, index), last_UV.unsqueeze(-1)], -1)


def _make_beams(trie: Trie, width: int, score: Tensor, leaf: Tensor, sid: Tensor, logp: Tensor) -> Beams:
    """Mark dead beams as invalid, look up the items of the leaves, and pad to `width`."""
    valid = score > -torch.inf
    item = trie.get_tensor("item_of_leaf", 0, leaf.device)[leaf].long().masked_fill(~valid, -1)
    sid = sid.masked_fill(~valid.unsqueeze(-1), -1)
    logp = logp.masked_fill(~valid.unsqueeze(-1), 0.0)
    missing = width - item.shape[1]  # the whole code space is smaller than the beam
    if missing > 0:
        pad = torch.nn.functional.pad
        item, valid = pad(item, (0, missing), value=-1), pad(valid, (0, missing), value=False)
        sid, logp = pad(sid, (0, 0, 0, missing), value=-1), pad(logp, (0, 0, 0, missing))
    return Beams(item, sid, logp, valid)


def _find_dead_nodes(
    trie: Trie, forbidden: Jagged, users: int, device: Any, within: SubCatalogue | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Find for each level the (user, node) pairs below which every allowed item is forbidden, as two tensors [D].

    Forbidden leaves are sorted, so those below one node are adjacent and counting them is a run-length count. The work is
    O(F log F) for F forbidden items, whatever the size of the catalogue.
    """
    user_F, leaf_F = _find_forbidden_leaves(trie, forbidden, users, device)
    if within is not None:
        there_F = ~within.mask_excluded_pairs(user_F, leaf_F, users)
        user_F, leaf_F = user_F[there_F], leaf_F[there_F]
    dead = {}
    for level in range(1, trie.levels + 1):
        node_F, nodes = trie.find_nodes(level, leaf_F), trie.n_nodes[level]
        pair, count = torch.unique_consecutive(user_F * nodes + node_F, return_counts=True)
        user, node = pair // nodes, pair % nodes
        below = trie.count_leaves(level, node)
        full = count == below if within is None else within.are_all(level, user, node, count, users)
        if bool(full.any()):
            dead[level] = (user[full], node[full])
    return dead


def _find_forbidden_leaves(trie: Trie, forbidden: Jagged, users: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return distinct (user, leaf) pairs ordered by user, then leaf; items outside the catalogue are dropped."""
    offsets = torch.as_tensor(forbidden.offsets).to(device)
    if len(offsets) != users + 1:
        raise ConfigError(
            f"`forbidden` has {len(offsets) - 1} rows for {users} prompts; it needs a row a prompt."
        )
    item = torch.as_tensor(forbidden.values).to(device).long()
    user = torch.repeat_interleave(offsets.diff())
    leaf = trie.get_tensor("leaf_of_item", 0, device)[item].long()
    pair = torch.unique((user * trie.n_leaves + leaf)[leaf >= 0])
    return pair // trie.n_leaves, pair % trie.n_leaves


def _mask_dead_nodes(
    total_UVK: Tensor, trie: Trie, level: int, node_UV: Tensor, user_D: Tensor, child_D: Tensor
) -> None:
    """Set the score of dead children to -inf, in place, wherever their parent is in the beam."""
    parent_D = trie.find_parents(level, child_D)
    code_D = trie.get_tensor("code", level, node_UV.device)[child_D].long()
    hit, beam = (node_UV[user_D] == parent_D.unsqueeze(-1)).nonzero(as_tuple=True)
    total_UVK[user_D[hit], beam, code_D[hit]] = -torch.inf
