"""Supervised loss of a SID model: the negative log-likelihood of the next items' semantic ids, as a sum.

The result is a sum and a count, not a mean: the trainer divides by the count over all ranks, so the loss does not depend on the
world size. With a catalogue, the softmax of every level is over legal codes only, the distribution that beams, exhaustive scores
and RL use (recall@10 0.119 against 0.101 after ten epochs); nodes with one child have loss 0 and are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nonet.errors import DataError
from nonet.models import SidModel
from nonet.types import SampleBatch

# Shapes: T positions, M targets, A states that each is predicted from, L levels, K codes of a level, D width.


class CodeTree(Protocol):
    """The part of nonet.models.generation.trie.Trie that the loss uses."""

    def find_children(self, level: int, nodes: Tensor) -> Tensor:
        """Return the child nodes [M, K] of nodes [M], -1 where there is none."""
        ...


def compute_sid_loss(
    model: SidModel,
    batch: SampleBatch,
    rows: Mapping[str, Tensor],
    catalogue: CodeTree | None = None,
    *,
    ahead: int = 1,
    smoothing: float = 0.0,
    weight_M: Tensor | None = None,
    state_TD: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Compute the loss in nats, summed over the targets of the batch, and the number of targets.

    Args:
        model: The model.
        batch: The batch.
        rows: Sparse rows by feature.
        catalogue: Trie of the legal semantic ids; None allows all codes.
        ahead: Number of states that each target is predicted from: those 1 .. `ahead` events before it, with weights proportional
            to 1 / distance that sum to 1. This trains the prediction of what comes soon, and regularises.
        smoothing: Share of each level's target that is spread evenly over its legal siblings (Szegedy et al., 2016).
        weight_M: Weight of each target; None for 1.
        state_TD: Result of `model.states`; None to compute it.
    """
    state_TD = model.states(batch, rows) if state_TD is None else state_TD
    sid_ML = model.targets(batch)
    position_MA = torch.stack(
        [model.target_positions(batch, distance) for distance in range(1, ahead + 1)], 1
    )
    weight_A = 1 / torch.arange(1, ahead + 1, device=state_TD.device, dtype=state_TD.dtype)
    weight_MA = (weight_A / weight_A.sum()).where(position_MA >= 0, 0.0)
    choices, illegal = _find_choices(sid_ML, catalogue, model.levels)
    logits = model.teacher_forced_logits(batch, state_TD, position_MA, sid_ML, choices)
    nats_MA = state_TD.new_zeros(position_MA.shape)
    for level, (choice, logits_MAK) in enumerate(zip(choices, logits, strict=True)):
        if catalogue is not None:
            logits_MAK = logits_MAK.masked_fill(illegal[level], -torch.inf)
        code_MA = sid_ML[choice, level, None].expand(-1, position_MA.shape[1])
        level_nats_MA = functional.cross_entropy(
            logits_MAK.flatten(0, 1), code_MA.flatten(), reduction="none"
        ).view_as(code_MA)
        if smoothing:
            uniform_nats_MA = _compute_uniform_loss(
                logits_MAK, illegal[level] if catalogue is not None else None
            )
            level_nats_MA = (1 - smoothing) * level_nats_MA + smoothing * uniform_nats_MA
        nats_MA = nats_MA.index_add(0, choice, level_nats_MA)
    if weight_M is not None:
        weight_MA = weight_MA * weight_M[:, None]
    return (nats_MA * weight_MA).sum(), len(sid_ML)


def _compute_uniform_loss(logits_MAK: Tensor, illegal_M1K: Tensor | None) -> Tensor:
    """Compute the loss [M, A] in nats of a target distribution that is uniform over the legal codes."""
    logp_MAK = logits_MAK.log_softmax(-1)
    if illegal_M1K is None:
        return -logp_MAK.mean(-1)
    legal_M1 = (~illegal_M1K).sum(-1)
    return -logp_MAK.masked_fill(illegal_M1K, 0.0).sum(-1) / legal_M1


def _find_choices(
    sid_ML: Tensor, catalogue: CodeTree | None, levels: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return per level the indices [m] of the targets with several legal codes, and a mask [m, 1, K] of their illegal codes.

    Without a catalogue, these are all targets, and there are no masks.
    """
    all_targets = torch.arange(len(sid_ML), device=sid_ML.device)
    if catalogue is None:
        return [all_targets] * levels, []
    choices, illegal = [], []
    node_M = torch.zeros_like(all_targets)
    for level in range(levels):
        child_MK = catalogue.find_children(level, node_M)
        node_M = child_MK.gather(1, sid_ML[:, level, None]).squeeze(1)
        _require_listed(node_M, sid_ML)
        choices.append(((child_MK >= 0).sum(1) > 1).nonzero().squeeze(1))
        illegal.append((child_MK[choices[-1]] < 0)[:, None])
    return choices, illegal


def _require_listed(node_M: Tensor, sid_ML: Tensor) -> None:
    """Raise DataError if a target's semantic id is not in the catalogue."""
    outside = (node_M < 0).nonzero()
    if len(outside):
        raise DataError(
            f"{len(outside)} of {len(sid_ML)} targets have a semantic id outside the catalogue, first "
            f"{tuple(sid_ML[outside[0, 0]].tolist())}. Train with the catalogue of all items."
        )
