"""Depth decoder with attention: the query of a level attends to the user's history and the codes chosen before it, then decodes.

With h the state that a target is predicted from, y = h + M_l attend(Q_l h + sum of the chosen codes' queries), and the logits of
level l are those that `depth.py` computes for y. The keys are those of the history's states, which all levels and beams of a
prompt share, followed by one per chosen code; one softmax covers both, as in TIGER and OneRec. Rotary embedding by the position
in the history rotates half of each head. The key of a code has zeros in that half, so its score does not depend on the position
of the query. M_l is initialised with zeros, so the untrained decoder equals the one without attention.

With teacher forcing, one call of uni_attention computes all levels and targets. The two key intervals of a row are the states of
its sequence up to the one that its target is predicted from, and the earlier codes of its own target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nonet.attention import BeamCache, uni_attention
from nonet.attention.masks import UniMask
from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.sid_decoder.blocks import compute_rotary, rotate
from nonet.models.sid_decoder.depth import DepthDecoder
from nonet.models.sid_decoder.target_pages import TargetPages

# Shapes: T packed history states of B sequences, S packed code tokens, M targets, A states from which each target is predicted,
# R rows (pairs of a target and a level), U prompts, W prefixes per prompt, l chosen codes, D width, H heads, E = D / H.


class DepthAttention(DepthDecoder):
    """Computes the logits of each level with attention to the history; `codes` has the number of codes K of each level."""

    def __init__(self, codes: Sequence[int], width: int, dropout: float, heads: int):
        super().__init__(codes, width, dropout)
        self.heads, head_width = heads, width // heads
        self.rotary_width = head_width // 4 * 2
        self.remember = nn.Linear(width, 2 * width)  # keys and values of the history
        self.query = nn.ModuleList(nn.Linear(width, width) for _ in codes)
        self.sought = nn.ModuleList(  # by level, query terms of the codes chosen on earlier levels
            nn.ModuleList(nn.Embedding(k, width) for k in codes[:level]) for level in range(len(codes))
        )
        self.key = nn.ModuleList(
            nn.Embedding(k, heads * (head_width - self.rotary_width)) for k in codes[:-1]
        )
        self.value = nn.ModuleList(nn.Embedding(k, width) for k in codes[:-1])
        self.merge = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in codes)

    def get_zero_weights(self) -> list[Tensor]:
        """Return the weights that are initialised with zeros."""
        return [*super().get_zero_weights(), *(merge.weight for merge in self.merge)]  # type: ignore[misc]

    def cache(self, state_TD: Tensor, cuts_B1: Tensor) -> DecoderCache:
        """Build the cache of the last state of each sequence and the keys and values of all states."""
        return DecoderCache(state_TD[cuts_B1[1:] - 1], *self._project_history(state_TD, cuts_B1), cuts_B1)

    def compute_legal_logits(
        self, cache: DecoderCache, level: int, prefix_ml: Tensor, row_c: Tensor, code_c: Tensor
    ) -> Tensor | None:
        """Return None, since the attention of equal prefixes differs by prompt, so prompts cannot share logits."""
        return None

    def teacher_forced_logits(
        self,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits [m, A, K] of each level, with the targets' own codes as prefixes."""
        # A negative position has undefined logits, so any valid one can stand in.
        position_MA = position_MA.where(position_MA >= 0, position_MA[:, :1])
        state_MAD = state_TD.index_select(0, position_MA.flatten()).unflatten(0, position_MA.shape)
        states = [state_MAD.index_select(0, choice) for choice in choices]
        prefixes = [sid_ML[choice, :level][:, None] for level, choice in enumerate(choices)]
        query_RD = torch.cat(
            [
                self._compute_queries(*state_and_prefix, level)
                for level, state_and_prefix in enumerate(zip(states, prefixes, strict=True))
            ]
        )
        target_R = torch.cat(list(choices))
        level_R = torch.repeat_interleave(torch.tensor([len(choice) for choice in choices])).to(
            target_R.device
        )
        # uni_attention needs the rows packed by sequence; targets are in the order of sequences.
        order_R = (target_R * len(choices) + level_R).argsort()
        attended_RAD = self._attend_targets(
            query_RD[order_R], target_R[order_R], level_R[order_R], state_TD, cuts_B1, position_MA, sid_ML
        )
        attended_RAD = torch.empty_like(attended_RAD).index_copy(0, order_R, attended_RAD)
        parts = attended_RAD.split([len(choice) for choice in choices])
        for level, (state, prefix, attended) in enumerate(zip(states, prefixes, parts, strict=True)):
            yield self._logits(state + self.merge[level](attended), prefix, level)

    def _attend_targets(
        self,
        query_RAD: Tensor,
        target_R: Tensor,
        level_R: Tensor,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
    ) -> Tensor:
        """Compute the attention output [R, A, D] of rows that are in the order of targets."""
        if not query_RAD.numel():
            return query_RAD
        pages, codes_per_target = TargetPages.of(cuts_B1, position_MA[:, 0]), sid_ML.shape[1] - 1
        state_S = pages.locate_states()
        history = tuple(x.index_select(0, state_S) for x in self._project_history(state_TD, cuts_B1))
        code_tokens = tuple(x.flatten(0, 1) for x in self._project_codes(sid_ML[:, :-1]))
        keys, values, cu_k = _append_code_tokens(
            history, pages.cuts, code_tokens, codes_per_target * pages.first
        )
        position_RA = position_MA[target_R]
        rotary_position_RA = position_RA - pages.begin[pages.page[target_R], None]
        q = self._rotate_head(query_RAD.unflatten(-1, (self.heads, -1)), rotary_position_RA)
        attended = uni_attention(
            q.flatten(0, 1),
            keys,
            values,
            mask=UniMask.intervals(
                *pages.compute_intervals(target_R, level_R, position_RA, codes_per_target)
            ),
            cu_seqlens_q=position_MA.shape[1] * pages.locate_rows(target_R),
            cu_seqlens_k=cu_k,
        )
        return attended.unflatten(0, position_RA.shape).flatten(2)

    def forward(self, cache: DecoderCache, prefix_UWl: Tensor, level: int) -> Tensor:
        """Compute the logits [U, W, K] of a level after prefixes of codes [U, W, l]."""
        state_U1D, (keys, values) = cache.state[:, None], self._project_codes(prefix_UWl)
        keys_SHE, values_SHE, cuts_U1 = cache.get_history()
        q = self._compute_queries(state_U1D, prefix_UWl, level).unflatten(-1, (self.heads, -1))
        q = self._rotate_head(q, cuts_U1.diff()[:, None] - 1)
        if torch.is_grad_enabled() and q.requires_grad:
            attended = _attend_packed(q, keys_SHE, values_SHE, cuts_U1, keys, values)
        else:
            attended = BeamCache(keys_SHE, values_SHE, cuts_U1, keys, values).attend(q)
        return self._logits(state_U1D + self.merge[level](attended.flatten(2)), prefix_UWl, level)

    def _compute_queries(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        """Compute queries [.., D] before rotation, from one state per prefix.

        States and prefixes may be broadcast over the second dimension.
        """
        query = self.query[level](state)
        if level == 0:
            return query
        tables = self.sought[level]
        codes = [table(prefix[..., index]) for index, table in enumerate(tables)]  # type: ignore[arg-type]
        # The codes are summed first, so prefixes that prompts share (a broadcast dimension) are summed once.
        return query + sum(codes[1:], codes[0])

    def _project_history(self, state_TD: Tensor, cuts_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values [T, H, E] of the states, rotated by their position in the sequence."""
        keys, values = self.remember(state_TD).unflatten(-1, (2, self.heads, -1)).unbind(1)
        index_T = torch.arange(len(state_TD), device=cuts_B1.device)
        return self._rotate_head(keys, index_T - cuts_B1[_find_sequences(index_T, cuts_B1)]), values

    def _project_codes(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values [.., l, H, E] of the chosen codes [.., l]."""
        keys = [table(code) for table, code in zip(self.key, prefix.unbind(-1), strict=False)]
        values = [table(code) for table, code in zip(self.value, prefix.unbind(-1), strict=False)]
        if not keys:
            head_width = self.query[0].out_features // self.heads  # type: ignore[operator]
            empty = self.query[0].weight.new_zeros(*prefix.shape, self.heads, head_width)  # type: ignore[operator]
            return empty, empty
        keys, values = (torch.stack(x, -2).unflatten(-1, (self.heads, -1)) for x in (keys, values))
        return pad(keys, (self.rotary_width, 0)), values

    def _rotate_head(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate the first part of each head of x [.., H, E] by its position [..], which is broadcast over further dimensions."""
        if not self.rotary_width:
            return x
        cosine, sine = (
            t.view(*position.shape, 1, -1) for t in compute_rotary(position.flatten(), self.rotary_width)
        )
        return torch.cat(
            [rotate(x[..., : self.rotary_width], (cosine, sine)), x[..., self.rotary_width :]], -1
        )


def _attend_packed(
    q_UWHE: Tensor, keys: Tensor, values: Tensor, cuts_U1: Tensor, code_keys: Tensor, code_values: Tensor
) -> Tensor:
    """Compute the result of `BeamCache.attend`, but differentiable, by one packed call of uni_attention.

    Each beam attends to its prompt's history and to the keys of its own codes, which are [U, W, l, H, E].
    """
    prompts, beams, n_codes = len(q_UWHE), q_UWHE.shape[1], code_keys.shape[2]
    index_U1 = torch.arange(prompts + 1, device=cuts_U1.device)
    code_tokens = tuple(x.expand(prompts, *x.shape[1:]).flatten(0, 2) for x in (code_keys, code_values))
    keys, values, cu_k = _append_code_tokens((keys, values), cuts_U1, code_tokens, beams * n_codes * index_U1)
    history_UW = cuts_U1.diff()[:, None].expand(-1, beams)
    code_start_UW = history_UW + n_codes * torch.arange(beams, device=cuts_U1.device)
    start = torch.stack([torch.zeros_like(code_start_UW), code_start_UW], -1).flatten(0, 1)
    stop = torch.stack([history_UW, code_start_UW + n_codes], -1).flatten(0, 1)
    attended = uni_attention(
        q_UWHE.flatten(0, 1),
        keys,
        values,
        mask=UniMask.intervals(start, stop),
        cu_seqlens_q=beams * index_U1,
        cu_seqlens_k=cu_k,
    )
    return attended.unflatten(0, (prompts, beams))


def _append_code_tokens(
    history: tuple[Tensor, ...], cuts_B1: Tensor, code_tokens: tuple[Tensor, ...], code_cuts_B1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack keys and values as [history of a sequence | its code tokens]; return both, and the offsets [B + 1] of sequences."""
    index_T = torch.arange(len(history[0]), device=cuts_B1.device)
    index_S = torch.arange(len(code_tokens[0]), device=cuts_B1.device)
    row_T = index_T + code_cuts_B1[_find_sequences(index_T, cuts_B1)]
    row_S = index_S + cuts_B1[_find_sequences(index_S, code_cuts_B1) + 1]
    row_of_token = torch.cat([row_T, row_S])
    keys_and_values = (torch.cat(x) for x in zip(history, code_tokens, strict=True))
    keys, values = (torch.empty_like(x).index_copy(0, row_of_token, x) for x in keys_and_values)
    return keys, values, cuts_B1 + code_cuts_B1


def _find_sequences(index: Tensor, cuts_B1: Tensor) -> Tensor:
    """Return the sequence that contains each index of a packed token."""
    return torch.searchsorted(cuts_B1, index, right=True) - 1
