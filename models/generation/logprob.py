"""Log-probability of semantic ids under the catalogue's constrained distribution.

At each level the model's logits are renormalised over the codes that lead to an item of the catalogue, so the probabilities of
all items of the catalogue sum to one. Rollout and trainer call the same `legal_log_softmax`, so the log-probabilities of an
unchanged model agree to 1e-6 relative in float32 (tests/models/generation/test_logprob.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import DataError
from nonet.models import PromptCache, SidModel
from nonet.models.generation.trie import Trie
from nonet.types import SampleBatch

# Shapes: U users (prompts), W beams, X leaves per prompt, M evaluated nodes of a level per prompt, L levels, K codes of a level.


def legal_log_softmax(logits: Tensor, legal: Tensor) -> Tensor:
    """Compute the log-softmax over legal codes, in nats; -inf where a code is illegal.

    Args:
        logits: Logits [..., K]; half precision is computed in float32.
        legal: Mask [..., K]; every row needs a legal code.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits.masked_fill(~legal, -torch.inf).log_softmax(-1)


def log_prob(
    model: SidModel, batch: SampleBatch, rows: Mapping[str, Tensor], sids: Tensor, trie: Trie
) -> Tensor:
    """Compute the constrained log-probability [U, W, L] in nats of SIDs [U, W, L] given each prompt of `batch`; differentiable.

    A SID of -1 (no beam) gives 0 on every level and no gradient.

    Raises:
        DataError: A SID is outside the catalogue.
    """
    return log_prob_from(model, model.prefill(batch, rows), sids, trie)


def log_prob_from(model: SidModel, cache: PromptCache, sids: Tensor, trie: Trie) -> Tensor:
    """Compute `log_prob` from the cache of a prefill of the U prompts."""
    sids_UWL = sids.long()
    valid_UW = (sids_UWL >= 0).all(-1)
    node_UW = torch.zeros_like(valid_UW, dtype=torch.int64)
    codes_UWL = sids_UWL.clamp_min(0)
    logp_by_level = []
    for level in range(trie.levels):
        # On level 0 all beams of a user have the same, empty prefix, so one of them is computed.
        beams = slice(0, 1) if level == 0 else slice(None)
        child_UWK = trie.find_children(level, node_UW[:, beams])
        logp_UWK = legal_log_softmax(model.step(cache, codes_UWL[:, beams, :level], level), child_UWK >= 0)
        child_UWK, logp_UWK = (x.expand(-1, sids_UWL.shape[1], -1) for x in (child_UWK, logp_UWK))
        code_UW1 = codes_UWL[:, :, level, None]
        node_UW = child_UWK.gather(-1, code_UW1).squeeze(-1)
        _require_in_catalogue(sids_UWL, valid_UW & (node_UW < 0), trie)
        chosen_UW = logp_UWK.gather(-1, code_UW1).squeeze(-1)
        logp_by_level.append(torch.where(valid_UW, chosen_UW, 0.0))
        node_UW = node_UW.clamp_min(0)
    return torch.stack(logp_by_level, -1)


@dataclass(frozen=True, slots=True)
class SortedLeaves:
    """Leaves in ascending order per prompt.

    Attributes:
        leaf: Sorted leaves [U, X]; -1 is no leaf, its log-probability is 0 on every level.
        codes: Codes [U, X, L] of their paths.
        order: Original index [U, X] of each sorted leaf.
    """

    leaf: Tensor
    codes: Tensor
    order: Tensor

    @classmethod
    def of(cls, trie: Trie, leaf_UX: Tensor) -> SortedLeaves:
        """Sort the leaves of each prompt."""
        leaf, order = leaf_UX.sort(dim=1, stable=True)
        codes = trie.decode_prefixes(trie.levels, leaf.clamp_min(0).flatten()).unflatten(0, leaf.shape)
        return cls(leaf, codes, order)


def compute_path_log_probs(model: SidModel, cache: PromptCache, trie: Trie, leaves: SortedLeaves) -> Tensor:
    """Compute the constrained log-probability [U, X, L] in nats of every level of the paths to leaves; differentiable.

    The result is in the original order of the leaves.
    """
    logp_by_level = [_compute_level(model, cache, trie, leaves, level) for level in range(trie.levels)]
    logp_UXL = torch.stack(logp_by_level, -1).masked_fill(leaves.leaf.unsqueeze(-1) < 0, 0.0)
    sorted_index_UX = leaves.order.argsort(1)
    return logp_UXL.gather(1, sorted_index_UX.unsqueeze(-1).expand_as(logp_UXL))


def _compute_level(
    model: SidModel, cache: PromptCache, trie: Trie, leaves: SortedLeaves, level: int
) -> Tensor:
    """Compute the log-probabilities of one level [U, X], in the order of the sorted leaves.

    Only nodes with several children are evaluated, once per prompt: leaves below one node are adjacent. With gradients there is
    always one step, because the ranks of a divided model take the same passes, and a loss needs the weights.
    """
    device = leaves.leaf.device
    first_leaf, first_child = (trie.get_tensor(name, level, device) for name in ("first_leaf", "first_child"))
    node_UX = torch.searchsorted(first_leaf, leaves.leaf.clamp_min(0), right=True) - 1
    has_choice_UX = first_child[node_UX + 1] - first_child[node_UX] > 1
    is_new_node_UX = has_choice_UX.clone()
    is_new_node_UX[:, 1:] &= (node_UX[:, 1:] != node_UX[:, :-1]) | ~has_choice_UX[:, :-1]
    column_UX = (is_new_node_UX.cumsum(1) - 1).clamp_min(0)
    n_columns = int(is_new_node_UX.sum(1).max()) if is_new_node_UX.numel() else 0
    if not n_columns and not torch.is_grad_enabled():
        return cache.state.new_zeros(leaves.leaf.shape)
    n_columns = max(1, n_columns)
    new_user, new_leaf = is_new_node_UX.nonzero(as_tuple=True)
    new_column = column_UX[new_user, new_leaf]
    node_UM = node_UX.new_zeros(len(node_UX), n_columns)
    node_UM[new_user, new_column] = node_UX[new_user, new_leaf]
    prefix_UMl = leaves.codes.new_zeros(len(node_UX), n_columns, level)
    prefix_UMl[new_user, new_column] = leaves.codes[new_user, new_leaf, :level]
    legal_UMK = trie.find_children(level, node_UM) >= 0
    logp_UMK = legal_log_softmax(model.step(cache, prefix_UMl, level), legal_UMK)
    n_codes = logp_UMK.shape[-1]
    chosen_UX = logp_UMK.flatten(1).gather(1, column_UX * n_codes + leaves.codes[..., level])
    return torch.where(has_choice_UX, chosen_UX, 0.0)


def find_leaves(sids: Tensor, trie: Trie) -> Tensor:
    """Return the leaf [U, W] of each SID [U, W, L], -1 for a SID of -1.

    Raises:
        DataError: A SID is outside the catalogue.
    """
    sids_UWL = sids.long()
    valid_UW = (sids_UWL >= 0).all(-1)
    node_UW = torch.zeros_like(valid_UW, dtype=torch.int64)
    for level in range(trie.levels):
        code_UW1 = sids_UWL[..., level, None].clamp_min(0)
        node_UW = trie.find_children(level, node_UW).gather(-1, code_UW1).squeeze(-1)
        _require_in_catalogue(sids_UWL, valid_UW & (node_UW < 0), trie)
        node_UW = node_UW.clamp_min(0)
    return node_UW.masked_fill(~valid_UW, -1)


def _require_in_catalogue(sids_UWL: Tensor, illegal_UW: Tensor, trie: Trie) -> None:
    """Raise DataError, which names the first illegal SID, if any SID is outside the catalogue."""
    if not bool(illegal_UW.any()):
        return
    user, beam = illegal_UW.nonzero()[0].tolist()
    raise DataError(
        f"SID {tuple(sids_UWL[user, beam].tolist())} (prompt {user}, beam {beam}) is not in catalogue "
        f"{trie.version}; {int(illegal_UW.sum())} beams are not. Roll out and train with the same catalogue."
    )
