"""The expected reward of a policy over the whole catalogue, whose gradient is the exact policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.models import PromptCache, SidModel
from nonet.models.generation import Trie, Votes, compute_leaf_log_probs

# Shapes: U prompts, I items, X leaves.


def compute_expected_reward(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    votes: Votes | None,
    reward_UI: Tensor,
    allowed_UI: Tensor | None = None,
) -> Tensor:
    """Compute the expected reward of one item drawn from the policy; differentiable.

    Args:
        model: The model.
        cache: The model's prefill of the prompts.
        trie: The trie of the catalogue.
        votes: Votes of the memory; None for the model alone.
        reward_UI: Reward of each item; items outside the catalogue are ignored.
        allowed_UI: Items to which the policy is restricted; None for all.

    Returns:
        The expected reward [U]; 0 for a prompt without an allowed item.
    """
    item_X = trie.get_tensor("item_of_leaf", 0, cache.state.device)
    leaf_UX = torch.arange(trie.n_leaves, device=item_X.device).expand(len(cache.state), -1)
    logp_UX = compute_leaf_log_probs(model, cache, trie, leaf_UX, votes).sum(-1)
    reward_UX = reward_UI[:, item_X].to(logp_UX.dtype)
    if allowed_UI is not None:
        logp_UX = logp_UX.masked_fill(~allowed_UI[:, item_X], -torch.inf)
        any_allowed_U1 = allowed_UI[:, item_X].any(1, keepdim=True)
        total_U1 = torch.where(any_allowed_U1, logp_UX, 0.0).logsumexp(1, keepdim=True)
        logp_UX = torch.where(any_allowed_U1, logp_UX - total_U1, -torch.inf)
    return (logp_UX.exp() * reward_UX).sum(1)
