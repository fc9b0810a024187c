"""Depth decoder: from a history state and the codes chosen so far to the logits of the next code.

logits_l = V_l norm(S_l h + W_l relu(A_l h + sum of the chosen codes' vectors)) + P_l h . child(prefix, code).
A_l h, S_l h and P_l h are computed once a user and the code part once a prefix, so scoring a whole catalogue is mostly
one broadcast addition a (user, prefix). The `child` vectors are hashed by the whole path: they let a code mean something
else under another prefix, which the shared V_l cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.models.sid_decoder.beam_cache import Cache
from nonet.models.sid_decoder.spec import DEPTH_RANK, DEPTH_ROWS

# Shapes: U prompts, W prefixes a prompt, T packed states of B sequences, M targets, A states that each is asked from, L levels,
# K codes of the level, D width, R rank.
_MIX = 1_000_003
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio, as the signed 64-bit number torch multiplies by


class DepthDecoder(nn.Module):
    """Logits of each level; `codes` is K by level."""

    def __init__(self, codes: Sequence[int], width: int, dropout: float):
        super().__init__()
        hidden = 2 * width
        self.codes, self.dropout = tuple(codes), dropout
        self.read = nn.ModuleList(nn.Linear(width, hidden) for _ in codes)
        self.skip = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in codes)
        self.write = nn.ModuleList(nn.Linear(hidden, width) for _ in codes)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in codes)
        self.out = nn.ModuleList(nn.Linear(width, k) for k in codes)
        self.chosen = nn.ModuleList(
            nn.ModuleList(nn.Embedding(k, hidden) for k in codes[:level]) for level in range(len(codes))
        )
        self.child = nn.Embedding(DEPTH_ROWS, DEPTH_RANK)
        self.ask = nn.ModuleList(nn.Linear(width, DEPTH_RANK, bias=False) for _ in codes[1:])

    def at_zero(self) -> list[Tensor]:
        """Weights that begin at zero: what is hashed."""
        return [self.child.weight]

    def cache(self, state_TD: Tensor, cuts_B1: Tensor) -> Cache:
        """What steps need of the packed states: the last of each sequence."""
        return Cache(state_TD[cuts_B1[1:] - 1])

    def forward(self, cache: Cache, prefix_UWl: Tensor, level: int) -> Tensor:
        """Logits [U, W, K] of `level`; prefix [U, W, level] int64, or [1, W, level] for the same prefixes everywhere."""
        return self._logits(cache.state[:, None], prefix_UWl, level)

    def teacher_forced_logits(
        self,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Teacher-forced logits [m, A, K] of each level, for the targets [m] (rising) that `choices` names at it.

        A target is asked from the states at its positions; what a position below 0 gives means nothing.
        """
        state_MAD = state_TD.index_select(0, position_MA.clamp_min(0).flatten()).unflatten(
            0, position_MA.shape
        )
        for level, choice in enumerate(choices):
            yield self._logits(state_MAD.index_select(0, choice), sid_ML[choice, :level][:, None], level)

    def _logits(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        """One state for each prefix, or one of the two broadcast over the second dimension."""
        hidden = self.read[level](state)
        for place, table in enumerate(self.chosen[level]):  # type: ignore[arg-type]
            hidden = hidden + table(prefix[..., place])
        wide = self.skip[level](state) + self.write[level](functional.relu(hidden))
        z = functional.dropout(self.norm[level](wide), self.dropout, self.training)
        logits = self.out[level](z)
        return logits if level == 0 else logits + self._by_path(state, prefix, level)

    def _by_path(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        ask = self.ask[level - 1](state)
        child_UWKR = self.child(_rows(prefix, self.codes[level]))
        if len(child_UWKR) == 1 and ask.shape[1] == 1:
            return (ask[:, 0] @ child_UWKR.flatten(0, 2).T).unflatten(1, child_UWKR.shape[1:3])
        return torch.einsum("uwkr,uwr->uwk", child_UWKR, ask)


def _rows(prefix_UWl: Tensor, codes: int) -> Tensor:
    """Hashed row [U, W, K] of each path that a next code would make."""
    path = torch.full_like(prefix_UWl[..., 0], prefix_UWl.shape[-1])
    for code in prefix_UWl.unbind(-1):
        path = path * _MIX + code + 1
    path = path[..., None] * _MIX + torch.arange(1, codes + 1, device=path.device)
    return (path * _SPREAD >> 40) & (DEPTH_ROWS - 1)
