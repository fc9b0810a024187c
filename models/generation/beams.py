"""Beam search over the catalogue: W legal, distinct items a user, best first.

The history is read once (`prefill`); each level costs one `step` over the live beams. Scores are sums of
constrained log-probabilities: at every node the model is renormalised over *all* codes that lead to an item
of the catalogue. Forbidden items stay in that normalisation and only lose their place in the beam, so a
beam's log-probability is the same number with and without them, and the same as in `log_prob`. Ties go to the
lower flat index parent * K + code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models import PromptCache, SidModel
from nonet.models.generation.logprob import legal_log_softmax
from nonet.models.generation.memory import remember
from nonet.models.generation.topk import top_k
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import Votes
from nonet.types import Jagged

# Shapes: U users, W beams asked for, V beams alive at a level (1, then up to W), L levels, K codes of the
# level.


@dataclass(frozen=True, slots=True)
class Beams:
    """item [U, W] int64 dense index, sid [U, W, L] int64, logp [U, W, L] nats, valid [U, W] bool; best beam
    first.

    Where a user has fewer than W items left: valid False, item -1, sid -1, logp 0; always at the end of the
    row.
    """

    item: Tensor
    sid: Tensor
    logp: Tensor
    valid: Tensor


@torch.no_grad()
def beam_search(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    width: int,
    *,
    forbidden: Jagged | None = None,
    votes: Votes | None = None,
) -> Beams:
    """The `width` best items of each prompt in `cache`; `forbidden` (dense item indices by user) never
    appear.

    A prefix with nothing but forbidden items below it is never entered, so `width` items come back whenever
    the catalogue has that many allowed ones. With `votes` they are the best of the model's mixture with its memory: those
    are among the model's own beams and the voted leaves.
    """
    if width < 1:
        raise ConfigError(f"beam width is {width}; it must be at least 1.")
    users, device = len(cache.state), cache.state.device
    dead = _dead_nodes(trie, forbidden, users, device) if forbidden is not None else {}
    node_UV = torch.zeros(users, 1, dtype=torch.int64, device=device)
    score_UV = torch.zeros(users, 1, device=device)
    sid_UVl = torch.zeros(users, 1, 0, dtype=torch.int64, device=device)
    logp_UVl = torch.zeros(users, 1, 0, device=device)
    for level in range(trie.levels):
        child_UVK = trie.children(level, node_UV)
        logp_UVK = legal_log_softmax(model.step(cache, sid_UVl, level), child_UVK >= 0)
        total_UVK = score_UV.unsqueeze(-1) + logp_UVK
        if level + 1 in dead:
            _bury(total_UVK, trie, level, node_UV, *dead[level + 1])
        codes = total_UVK.shape[-1]
        score_UV, flat_UV = top_k(total_UVK.flatten(1), width)
        parent_UV = flat_UV // codes
        node_UV = (
            child_UVK.flatten(1).gather(1, flat_UV).clamp_min(0)
        )  # a dead beam (-inf) follows the first node
        sid_UVl = _extend(sid_UVl, parent_UV, flat_UV % codes)
        logp_UVl = _extend(logp_UVl, parent_UV, logp_UVK.flatten(1).gather(1, flat_UV))
    if votes is not None:
        score_UV, node_UV, sid_UVl, logp_UVl = _merged(
            model, cache, trie, width, votes, (score_UV, node_UV, logp_UVl)
        )
    return _beams(trie, width, score_UV, node_UV, sid_UVl, logp_UVl)


def _merged(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    width: int,
    votes: Votes,
    beams: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best of the model's beams (score [U, V], leaf, logp by level) and the voted leaves, by their mixture."""
    score_UV, leaf_UV, logp_UVL = beams
    memory, voted_UVL, _ = remember(model, cache, trie, votes)
    votes = memory.votes
    again_UV = (leaf_UV[:, :, None] == votes.leaf[:, None, :]).any(-1) | (score_UV == -torch.inf)
    leaf_UX = torch.cat([leaf_UV, votes.leaf.clamp_min(0)], 1)
    gone_UX = torch.cat([again_UV, votes.leaf < 0], 1)
    level_UXL = torch.cat([logp_UVL.masked_fill(again_UV.unsqueeze(-1), 0.0), voted_UVL], 1)
    level_UXL = memory.levels(trie, leaf_UX, level_UXL)
    total_UX = level_UXL.sum(-1).masked_fill(gone_UX, -torch.inf)
    score_UW, best_UW = top_k(total_UX, width)
    leaf_UW = leaf_UX.gather(1, best_UW)
    logp_UWL = level_UXL.gather(1, best_UW.unsqueeze(-1).expand(-1, -1, level_UXL.shape[-1]))
    sid_UWL = trie.prefixes(trie.levels, leaf_UW.flatten()).unflatten(0, leaf_UW.shape)
    return score_UW, leaf_UW, sid_UWL, logp_UWL


def _extend(prefix_UVl: Tensor, parent_UV: Tensor, last_UV: Tensor) -> Tensor:
    """The parents' values with one more level."""
    index = parent_UV.unsqueeze(-1).expand(-1, -1, prefix_UVl.shape[-1])
    return torch.cat([prefix_UVl.gather(1, index), last_UV.unsqueeze(-1)], -1)


def _beams(trie: Trie, width: int, score: Tensor, leaf: Tensor, sid: Tensor, logp: Tensor) -> Beams:
    valid = score > -torch.inf
    item = trie.tensor("item_of_leaf", 0, leaf.device)[leaf].masked_fill(~valid, -1)
    sid = sid.masked_fill(~valid.unsqueeze(-1), -1)
    logp = logp.masked_fill(~valid.unsqueeze(-1), 0.0)
    missing = width - item.shape[1]  # the whole code space is smaller than the beam
    if missing > 0:
        pad = torch.nn.functional.pad
        item, valid = pad(item, (0, missing), value=-1), pad(valid, (0, missing), value=False)
        sid, logp = pad(sid, (0, 0, 0, missing), value=-1), pad(logp, (0, 0, 0, missing))
    return Beams(item, sid, logp, valid)


def _dead_nodes(trie: Trie, forbidden: Jagged, users: int, device: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """By level, the (user, node) pairs below which every item is forbidden: two tensors [D].

    Forbidden leaves are sorted, so those below one node are neighbours: counting them is a run length.
    The work is O(F log F) for F forbidden items, whatever the size of the catalogue.
    """
    user_F, leaf_F = _forbidden_leaves(trie, forbidden, users, device)
    dead = {}
    for level in range(1, trie.levels + 1):
        first = trie.tensor("first_leaf", level, device)
        node_F = torch.searchsorted(first, leaf_F, right=True) - 1
        nodes = len(first) - 1
        pair, count = torch.unique_consecutive(user_F * nodes + node_F, return_counts=True)
        node = pair % nodes
        full = count == first[node + 1] - first[node]
        if bool(full.any()):
            dead[level] = (pair[full] // nodes, node[full])
    return dead


def _forbidden_leaves(trie: Trie, forbidden: Jagged, users: int, device: Any) -> tuple[Tensor, Tensor]:
    """Distinct (user, leaf) pairs in order of user, then leaf; items outside the catalogue drop out."""
    offsets = torch.as_tensor(forbidden.offsets).to(device)
    if len(offsets) != users + 1:
        raise ConfigError(
            f"`forbidden` has {len(offsets) - 1} rows for {users} prompts; it needs a row a prompt."
        )
    item = torch.as_tensor(forbidden.values).to(device).long()
    user = torch.repeat_interleave(offsets.diff())
    leaf = trie.tensor("leaf_of_item", 0, device)[item]
    pair = torch.unique((user * trie.n_leaves + leaf)[leaf >= 0])
    return pair // trie.n_leaves, pair % trie.n_leaves


def _bury(
    total_UVK: Tensor, trie: Trie, level: int, node_UV: Tensor, user_D: Tensor, child_D: Tensor
) -> None:
    """Set the score of dead children to -inf, in place, wherever their parent is in the beam."""
    first = trie.tensor("first_child", level, node_UV.device)
    parent_D = torch.searchsorted(first, child_D, right=True) - 1
    code_D = trie.tensor("code", level, node_UV.device)[child_D].long()
    hit, beam = (node_UV[user_D] == parent_D.unsqueeze(-1)).nonzero(as_tuple=True)
    total_UVK[user_D[hit], beam, code_D[hit]] = -torch.inf
