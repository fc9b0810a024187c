"""Log-probability of semantic IDs under the catalogue's constrained distribution.

At each level the model's logits are renormalised over the codes that lead to an item of the catalogue, so the
probabilities of all items of the catalogue sum to one. Rollout and trainer call the same `legal_log_softmax`,
so the log-probabilities of an unchanged model agree to 1e-6 relative in float32 (tests/models/generation/test_logprob.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nonet.errors import DataError
from nonet.models import PromptCache, SidModel
from nonet.models.generation.trie import Trie
from nonet.types import SampleBatch

# Shapes: U users (prompts), W beams, L levels, K codes of the level, D width.


def legal_log_softmax(logits: Tensor, legal: Tensor) -> Tensor:
    """Log-softmax over legal codes: logits [..., K], legal [..., K] bool -> [..., K] nats, -inf where
    illegal.

    Every row needs a legal code. Half precision is computed in float32.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits.masked_fill(~legal, -torch.inf).log_softmax(-1)


def log_prob(
    model: SidModel, batch: SampleBatch, rows: Mapping[str, Tensor], sids: Tensor, trie: Trie
) -> Tensor:
    """Constrained log-probability of SIDs [U, W, L] given each prompt of `batch` -> [U, W, L] nats,
    differentiable.

    A SID of -1 (no beam) reads 0 on every level and carries no gradient. A SID outside the catalogue is a
    DataError.
    """
    return log_prob_from(model, model.prefill(batch, rows), sids, trie)


def log_prob_from(model: SidModel, cache: PromptCache, sids: Tensor, trie: Trie) -> Tensor:
    """`log_prob` after the prefill: the cache holds the U prompts."""
    sids_UWL = sids.long()
    valid_UW = (sids_UWL >= 0).all(-1)
    node_UW = torch.zeros_like(valid_UW, dtype=torch.int64)
    known_UWL = sids_UWL.clamp_min(0)
    out = []
    for level in range(trie.levels):
        beams = (
            slice(0, 1) if level == 0 else slice(None)
        )  # no code is known yet: one step serves a user's beams
        child_UWK = trie.children(level, node_UW[:, beams])
        logp_UWK = legal_log_softmax(model.step(cache, known_UWL[:, beams, :level], level), child_UWK >= 0)
        child_UWK, logp_UWK = (x.expand(-1, sids_UWL.shape[1], -1) for x in (child_UWK, logp_UWK))
        code_UW1 = known_UWL[:, :, level, None]
        node_UW = child_UWK.gather(-1, code_UW1).squeeze(-1)
        _refuse_illegal(sids_UWL, valid_UW & (node_UW < 0), trie)
        chosen_UW = logp_UWK.gather(-1, code_UW1).squeeze(-1)
        out.append(torch.where(valid_UW, chosen_UW, 0.0))
        node_UW = node_UW.clamp_min(0)
    return torch.stack(out, -1)


def leaves_of(sids: Tensor, trie: Trie) -> Tensor:
    """The leaf [U, W] that each SID [U, W, L] leads to, -1 for a SID of -1. Raises DataError for one outside the catalogue."""
    sids_UWL = sids.long()
    valid_UW = (sids_UWL >= 0).all(-1)
    node_UW = torch.zeros_like(valid_UW, dtype=torch.int64)
    for level in range(trie.levels):
        code_UW1 = sids_UWL[..., level, None].clamp_min(0)
        node_UW = trie.children(level, node_UW).gather(-1, code_UW1).squeeze(-1)
        _refuse_illegal(sids_UWL, valid_UW & (node_UW < 0), trie)
        node_UW = node_UW.clamp_min(0)
    return node_UW.masked_fill(~valid_UW, -1)


def _refuse_illegal(sids_UWL: Tensor, illegal_UW: Tensor, trie: Trie) -> None:
    if not bool(illegal_UW.any()):
        return
    user, beam = illegal_UW.nonzero()[0].tolist()
    raise DataError(
        f"SID {tuple(sids_UWL[user, beam].tolist())} (prompt {user}, beam {beam}) is not in catalogue "
        f"{trie.version}; {int(illegal_UW.sum())} beams are not. Roll out and train with the same catalogue."
    )
