"""Exact statistics of a policy over the whole catalogue: its entropy, and its KL to another policy.

The statistics are sums over all items instead of samples. Memory is proportional to U x I, so the catalogue must be small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.models import PromptCache, SidModel
from nonet.models.generation import Trie, Votes, mix_votes, score_items

# Shapes: U prompts, I items.


@torch.no_grad()
def compute_catalogue_log_prob(
    model: SidModel, cache: PromptCache, trie: Trie, votes: Votes | None
) -> Tensor:
    """Compute the log-probability [U, I] in nats of every item under the policy; -inf outside the catalogue."""
    model_logp_UI = score_items(model, cache, trie)
    return model_logp_UI if votes is None else mix_votes(model, trie, model_logp_UI, votes, cache.state)  # type: ignore[arg-type]


def entropy(logp_UI: Tensor) -> Tensor:
    """Compute the entropy [U] in nats of distributions over items, from log-probabilities [U, I]."""
    return -_compute_expectation(logp_UI, logp_UI)


def compute_kl(logp_UI: Tensor, other_UI: Tensor) -> Tensor:
    """Compute KL(policy || other) [U] over the whole catalogue in nats, from log-probabilities [U, I]."""
    return _compute_expectation(logp_UI, logp_UI - other_UI)


def _compute_expectation(logp_UI: Tensor, value_UI: Tensor) -> Tensor:
    """Compute the expectation [U] of a value [U, I]; values of items with probability 0 can be infinite and are ignored."""
    prob_UI = logp_UI.double().exp()
    return torch.where(prob_UI > 0, prob_UI * value_UI.double(), 0.0).sum(1)
