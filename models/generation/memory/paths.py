"""Log-probabilities of given leaves, a prompt's as one tree: shared prefixes are computed once, lone children not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.models import PromptCache, SidModel
from nonet.models.generation.logprob import legal_log_softmax
from nonet.models.generation.trie import Trie

# Shapes: U prompts, X leaves a prompt, M distinct nodes of a level a prompt, L levels, K codes of the level.


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves [U, X] in ascending order, the codes on the way to each [U, X, L], and where each was asked for [U, X].

    A leaf of -1 is none; it reads 0 on every level.
    """

    leaf: Tensor
    codes: Tensor
    order: Tensor

    @classmethod
    def of(cls, trie: Trie, leaf_UX: Tensor) -> Leaves:
        """Sorted a prompt."""
        leaf, order = leaf_UX.sort(dim=1, stable=True)
        codes = trie.prefixes(trie.levels, leaf.clamp_min(0).flatten()).unflatten(0, leaf.shape)
        return cls(leaf, codes, order)


def path_log_probs(model: SidModel, cache: PromptCache, trie: Trie, leaves: Leaves) -> Tensor:
    """Constrained log-probability [U, X, L] of every level on the way to leaves, in the order asked for; differentiable."""
    levels = [_level(model, cache, trie, leaves, level) for level in range(trie.levels)]
    logp_UXL = torch.stack(levels, -1).masked_fill(leaves.leaf.unsqueeze(-1) < 0, 0.0)
    back_UX = leaves.order.argsort(1)
    return logp_UXL.gather(1, back_UX.unsqueeze(-1).expand_as(logp_UXL))


def _level(model: SidModel, cache: PromptCache, trie: Trie, leaves: Leaves, level: int) -> Tensor:
    """Of one level [U, X], in order of leaves."""
    device = leaves.leaf.device
    first_leaf, first = (trie.tensor(name, level, device) for name in ("first_leaf", "first_child"))
    node_UX = torch.searchsorted(first_leaf, leaves.leaf.clamp_min(0), right=True) - 1
    choice_UX = first[node_UX + 1] - first[node_UX] > 1
    new_UX = choice_UX.clone()
    new_UX[:, 1:] &= (node_UX[:, 1:] != node_UX[:, :-1]) | ~choice_UX[:, :-1]
    slot_UX = (new_UX.cumsum(1) - 1).clamp_min(0)
    most = int(new_UX.sum(1).max()) if new_UX.numel() else 0
    if not most:
        return cache.state.new_zeros(leaves.leaf.shape)
    user, place = new_UX.nonzero(as_tuple=True)
    slot = slot_UX[user, place]
    node_UM = node_UX.new_zeros(len(node_UX), most)
    node_UM[user, slot] = node_UX[user, place]
    prefix_UMl = leaves.codes.new_zeros(len(node_UX), most, level)
    prefix_UMl[user, slot] = leaves.codes[user, place, :level]
    legal_UMK = trie.children(level, node_UM) >= 0
    logp_UMK = legal_log_softmax(model.step(cache, prefix_UMl, level), legal_UMK)
    codes = logp_UMK.shape[-1]
    chosen_UX = logp_UMK.flatten(1).gather(1, slot_UX * codes + leaves.codes[..., level])
    return torch.where(choice_UX, chosen_UX, 0.0)
