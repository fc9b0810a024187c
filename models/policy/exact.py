"""Exact statistics of a policy over the whole catalogue: its entropy, its KL to another policy, and its expected reward.

A trie is finite, so nothing is sampled. `compute_expected_reward` is differentiable: every inner node is evaluated once, and
its gradient is the policy gradient that estimators are compared with. Memory is U x I numbers, so it is for small catalogues.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.models import PromptCache, SidModel
from nonet.models.generation import Trie, Votes, compute_leaf_log_probs, mix_votes, score_items

# Shapes: U prompts, I items.


@torch.no_grad()
def compute_catalogue_log_prob(
    model: SidModel, cache: PromptCache, trie: Trie, votes: Votes | None
) -> Tensor:
    """Compute the log-probability [U, I] in nats of every item under the policy; -inf outside the catalogue."""
    own_UI = score_items(model, cache, trie)
    return own_UI if votes is None else mix_votes(model, trie, own_UI, votes, cache.state)  # type: ignore[arg-type]


def entropy(logp_UI: Tensor) -> Tensor:
    """Compute the entropy [U] of distributions over items, in nats."""
    return -_compute_expectation(logp_UI, logp_UI)


def compute_kl(logp_UI: Tensor, other_UI: Tensor) -> Tensor:
    """Compute KL(policy, other) [U] over the whole catalogue, in nats."""
    return _compute_expectation(logp_UI, logp_UI - other_UI)


def _compute_expectation(logp_UI: Tensor, value_UI: Tensor) -> Tensor:
    chance_UI = logp_UI.double().exp()
    return torch.where(chance_UI > 0, chance_UI * value_UI.double(), 0.0).sum(1)


def compute_expected_reward(
    model: SidModel,
    cache: PromptCache,
    trie: Trie,
    votes: Votes | None,
    reward_UI: Tensor,
    allowed_UI: Tensor | None = None,
) -> Tensor:
    """Compute the expected reward [U] of one item drawn from the policy; differentiable.

    With `allowed_UI` the policy is restricted to the allowed items. Items outside the catalogue are ignored. A prompt without an
    allowed item has expectation 0.
    """
    item = trie.get_tensor("item_of_leaf", 0, cache.state.device)
    leaf_UX = torch.arange(trie.n_leaves, device=item.device).expand(len(cache.state), -1)
    logp_UX = compute_leaf_log_probs(model, cache, trie, leaf_UX, votes).sum(-1)
    reward_UX = reward_UI[:, item].to(logp_UX.dtype)
    if allowed_UI is not None:
        logp_UX = logp_UX.masked_fill(~allowed_UI[:, item], -torch.inf)
        some_U1 = allowed_UI[:, item].any(1, keepdim=True)
        total_U1 = torch.where(some_U1, logp_UX, 0.0).logsumexp(1, keepdim=True)
        logp_UX = torch.where(some_U1, logp_UX - total_U1, -torch.inf)
    return (logp_UX.exp() * reward_UX).sum(1)
