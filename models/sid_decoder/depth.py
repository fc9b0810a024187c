"""Depth decoder: from a history state and the codes chosen so far to the logits of the next code.

logits_l = V_l norm(S_l h + W_l relu(A_l h + sum of the chosen codes' vectors)) + P_l h . child(prefix, code). A_l h, S_l h and
P_l h are computed once per user and the code part once per prefix, so scoring a whole catalogue is mostly one broadcast addition
per (user, prefix). The `child` vectors are hashed by the complete path, so a code can have another meaning under another prefix,
which the shared V_l cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.sid_decoder.spec import DEPTH_RANK, DEPTH_ROWS

# Shapes: U prompts, W prefixes per prompt, T packed states of B sequences, M targets, A states that predict each, L levels,
# K codes of the level, D width, H hidden width, R rank; m prefixes that all prompts share, c (prefix, next code) pairs of these.
_TILE = 1024  # Pairs of a prompt and a prefix per chunk of `compute_legal_logits`.
_PATH_MULTIPLIER = 1_000_003  # Prime multiplier of the polynomial that combines the codes of a path.
# Fibonacci hashing: 2^64 divided by the golden ratio, as a signed 64-bit number, which torch can multiply by.
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


class DepthDecoder(nn.Module):
    """Computes the logits of each level; `codes` has the number of codes K of each level."""

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

    def get_zero_weights(self) -> list[Tensor]:
        """Return the weights that are initialised with zero: those of hashed paths."""
        return [self.child.weight]

    def cache(self, state_TD: Tensor, cuts_B1: Tensor) -> DecoderCache:
        """Build the cache that steps need from packed states: the last state of each sequence."""
        return DecoderCache(state_TD[cuts_B1[1:] - 1])

    def forward(self, cache: DecoderCache, prefix_UWl: Tensor, level: int) -> Tensor:
        """Compute logits [U, W, K] of `level`.

        `prefix_UWl` is [U, W, level] int64, or [1, W, level] if all prompts have the same prefixes.
        """
        return self._logits(cache.state[:, None], prefix_UWl, level)

    def compute_legal_logits(
        self, cache: DecoderCache, level: int, prefix_ml: Tensor, row_c: Tensor, code_c: Tensor
    ) -> Tensor | None:
        """Compute logits [U, c] of code_c[i] after prefix_ml[row_c[i]]; row_c is ascending, and all prompts have these prefixes.

        Returns None in training, because dropout applies to the normalised values, which are not computed here. Prefixes are
        processed in tiles, so that hidden values stay in the processor's cache. The norm's mean is folded into the weights before
        it, its gain into those after it, and the logits are divided by its standard deviation at the end.
        """
        if self.training:
            return None
        state_UD, n_prefixes = cache.state, len(prefix_ml)
        write, out = self._get_linear(self.write, level), self._get_linear(self.out, level)
        norm = self.norm[level]
        assert isinstance(norm, nn.LayerNorm)
        read_UH = self.read[level](state_UD)
        chosen_mH = read_UH.new_zeros(n_prefixes, read_UH.shape[1])
        for earlier_level, table in enumerate(self.chosen[level]):  # type: ignore[arg-type]
            chosen_mH += table(prefix_ml[:, earlier_level])
        skip_UD = self.skip[level](state_UD) + write.bias
        write_DH, skip_UD = write.weight - write.weight.mean(0), skip_UD - skip_UD.mean(1, keepdim=True)
        out_DK = (out.weight * norm.weight).T.contiguous()
        logits_Uc = self._compute_path_logits(state_UD, prefix_ml[row_c], code_c, level)
        logits_Uc += (out.weight @ norm.bias + out.bias)[code_c]
        cuts = torch.searchsorted(row_c, torch.arange(n_prefixes + 1, device=row_c.device)).tolist()
        # Columns of the logits [U, m * K] of all codes after all prefixes.
        column_c = row_c * self.codes[level] + code_c
        for start in range(0, n_prefixes, _TILE):
            stop = min(start + _TILE, n_prefixes)
            pairs = slice(cuts[start], cuts[stop])
            columns, rows = column_c[pairs] - start * self.codes[level], row_c[pairs] - start
            users_per_tile = _TILE // (stop - start)
            for first_user in range(0, len(state_UD), users_per_tile):
                users = slice(first_user, first_user + users_per_tile)
                hidden = torch.add(read_UH[users, None], chosen_mH[start:stop]).relu_()
                # The inputs of the norm, whose mean is 0 because of the folded weights.
                wide = functional.linear(hidden, write_DH).add_(skip_UD[users, None])
                scale = (wide.square().mean(2) + norm.eps).rsqrt_()
                unscaled_logits = (wide @ out_DK).flatten(1).index_select(1, columns)
                logits_Uc[users, pairs].addcmul_(unscaled_logits, scale.index_select(1, rows))
        return logits_Uc

    def _get_linear(self, modules: nn.ModuleList, level: int) -> nn.Linear:
        """Return the linear layer of a level, with its type."""
        linear = modules[level]
        assert isinstance(linear, nn.Linear)
        return linear

    def _compute_path_logits(self, state_UD: Tensor, prefix_cl: Tensor, code_c: Tensor, level: int) -> Tensor:
        """Compute the term [U, c] of the hashed paths in the logits of codes after their prefixes."""
        if level == 0:
            return state_UD.new_zeros(len(state_UD), len(code_c))
        child_cR = self.child(_hash_path(_encode_path(prefix_cl), code_c))
        return self.ask[level - 1](state_UD) @ child_cR.T

    def teacher_forced_logits(
        self,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the teacher-forced logits [m, A, K] of each level, for the targets whose ascending indices [m] are its `choices`.

        A target is predicted from the states at its positions; the logits of negative positions are undefined.
        """
        state_MAD = state_TD.index_select(0, position_MA.clamp_min(0).flatten()).unflatten(
            0, position_MA.shape
        )
        for level, choice in enumerate(choices):
            yield self._logits(state_MAD.index_select(0, choice), sid_ML[choice, :level][:, None], level)

    def _logits(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        """Compute the logits of a level from one state per prefix; state or prefix may be broadcast over the second dimension."""
        hidden = self.read[level](state)
        for earlier_level, table in enumerate(self.chosen[level]):  # type: ignore[arg-type]
            hidden = hidden + table(prefix[..., earlier_level])
        wide = self.skip[level](state) + self.write[level](functional.relu(hidden))
        z = functional.dropout(self.norm[level](wide), self.dropout, self.training)
        logits = self.out[level](z)
        return logits if level == 0 else logits + self._score_paths(state, prefix, level)

    def _score_paths(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        """Compute the term [U, W, K] of the hashed paths in the logits of all codes of a level."""
        ask = self.ask[level - 1](state)
        child_UWKR = self.child(_hash_children(prefix, self.codes[level]))
        if len(child_UWKR) == 1 and ask.shape[1] == 1:  # shared prefixes, and one state per prompt
            return (ask[:, 0] @ child_UWKR.flatten(0, 2).T).unflatten(1, child_UWKR.shape[1:3])
        return torch.einsum("uwkr,uwr->uwk", child_UWKR, ask)


def _hash_children(prefix_UWl: Tensor, codes: int) -> Tensor:
    """Return the row of `child` [U, W, K] for each path of a prefix and a next code."""
    return _hash_path(_encode_path(prefix_UWl)[..., None], torch.arange(codes, device=prefix_UWl.device))


def _encode_path(prefix: Tensor) -> Tensor:
    """Combine the codes [..., l] of each prefix to one int64 number [...], which `_hash_path` hashes."""
    path = torch.full_like(prefix[..., 0], prefix.shape[-1])
    for code in prefix.unbind(-1):
        path = path * _PATH_MULTIPLIER + code + 1
    return path


def _hash_path(path: Tensor, code: Tensor) -> Tensor:
    """Return the row of `child` for the paths that consist of an encoded prefix and a next code."""
    return ((path * _PATH_MULTIPLIER + code + 1) * _HASH_MULTIPLIER >> 40) & (DEPTH_ROWS - 1)
