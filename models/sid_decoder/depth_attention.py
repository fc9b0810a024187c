"""Depth decoder with attention: the query of a level attends to the user's history and the codes chosen before it, then decodes.

y = h + M_l attend(Q_l h + sum of the chosen codes' queries); logits_l are those of `depth.py` for y. Keys are the history's
states, the same for all levels and beams of a prompt, followed by one token per chosen code; TIGER and OneRec also decode with
both in one softmax. Half of a head is rotated by the position in the history (rotary), the other half is not. A code's key uses
only the latter half, so it does not depend on the position of the query. M starts at zero: untrained, it is the plain decoder.

With teacher forcing, all levels and targets are one uni_attention call: a row attends to its sequence's states up to the one that
it is predicted from (slot 0), and to the earlier codes of its own target (slot 1).
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

# Shapes: T packed history states of B sequences, S packed code tokens, M targets, A states that each is predicted from, R rows
# (a level of a target), U prompts, W prefixes a prompt, l codes chosen, D width, H heads, E = D / H, C of them unturned.


class DepthAttention(DepthDecoder):
    """Computes the logits of each level with attention to the history; `codes` is K by level."""

    def __init__(self, codes: Sequence[int], width: int, dropout: float, heads: int):
        super().__init__(codes, width, dropout)
        self.heads, each = heads, width // heads
        self.turning = each // 4 * 2
        self.remember = nn.Linear(width, 2 * width)
        self.query = nn.ModuleList(nn.Linear(width, width) for _ in codes)
        self.sought = nn.ModuleList(
            nn.ModuleList(nn.Embedding(k, width) for k in codes[:level]) for level in range(len(codes))
        )
        self.key = nn.ModuleList(nn.Embedding(k, heads * (each - self.turning)) for k in codes[:-1])
        self.value = nn.ModuleList(nn.Embedding(k, width) for k in codes[:-1])
        self.merge = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in codes)

    def get_zero_weights(self) -> list[Tensor]:
        """Return the weights that are initialised with zeros."""
        return [*super().get_zero_weights(), *(merge.weight for merge in self.merge)]  # type: ignore[misc]

    def cache(self, state_TD: Tensor, cuts_B1: Tensor) -> DecoderCache:
        """Build the cache from the last state of each sequence, and the keys and values of all of them."""
        return DecoderCache(state_TD[cuts_B1[1:] - 1], *self._project_history(state_TD, cuts_B1), cuts_B1)

    def compute_legal_logits(
        self, cache: DecoderCache, level: int, prefix_ml: Tensor, row_c: Tensor, code_c: Tensor
    ) -> Tensor | None:
        """Return None: the attention of a prefix differs by prompt, so prompts share no computation."""
        return None

    def teacher_forced_logits(
        self,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits of each level, with the targets' codes as prefixes."""
        position_MA = position_MA.where(position_MA >= 0, position_MA[:, :1])
        state_MAD = state_TD.index_select(0, position_MA.flatten()).unflatten(0, position_MA.shape)
        states = [state_MAD.index_select(0, choice) for choice in choices]
        prefixes = [sid_ML[choice, :level][:, None] for level, choice in enumerate(choices)]
        query_RD = torch.cat(
            [
                self._compute_queries(*each, level)
                for level, each in enumerate(zip(states, prefixes, strict=True))
            ]
        )
        target_R = torch.cat(list(choices))
        level_R = torch.repeat_interleave(torch.tensor([len(choice) for choice in choices])).to(
            target_R.device
        )
        order_R = (target_R * len(choices) + level_R).argsort()  # packed rows lie by sequence, so by target
        seen_RAD = self._attend_targets(
            query_RD[order_R], target_R[order_R], level_R[order_R], state_TD, cuts_B1, position_MA, sid_ML
        )
        seen_RAD = torch.empty_like(seen_RAD).index_copy(0, order_R, seen_RAD)
        parts = seen_RAD.split([len(choice) for choice in choices])
        for level, (state, prefix, seen) in enumerate(zip(states, prefixes, parts, strict=True)):
            yield self._logits(state + self.merge[level](seen), prefix, level)

    def _attend_targets(
        self,
        asked_RAD: Tensor,
        target_R: Tensor,
        level_R: Tensor,
        state_TD: Tensor,
        cuts_B1: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
    ) -> Tensor:
        """Compute the attention output [R, A, D] of each row, in the order of targets."""
        if not asked_RAD.numel():
            return asked_RAD
        pages, tokens = TargetPages.of(cuts_B1, position_MA[:, 0]), sid_ML.shape[1] - 1
        state_S = pages.locate_states()
        history = tuple(x.index_select(0, state_S) for x in self._project_history(state_TD, cuts_B1))
        own = tuple(x.flatten(0, 1) for x in self._project_codes(sid_ML[:, :-1]))
        keys, values, cu_k = _append_own(history, pages.cuts, own, tokens * pages.first)
        position_RA = position_MA[target_R]
        place_RA = position_RA - pages.begin[pages.page[target_R], None]
        q = self._turn(asked_RAD.unflatten(-1, (self.heads, -1)), place_RA)
        seen = uni_attention(
            q.flatten(0, 1),
            keys,
            values,
            mask=UniMask.intervals(*pages.compute_intervals(target_R, level_R, position_RA, tokens)),
            cu_seqlens_q=position_MA.shape[1] * pages.locate_rows(target_R),
            cu_seqlens_k=cu_k,
        )
        return seen.unflatten(0, position_RA.shape).flatten(2)

    def forward(self, cache: DecoderCache, prefix_UWl: Tensor, level: int) -> Tensor:
        """Return the logits [U, W, K] of a level after prefixes of codes."""
        state_U1D, (keys, values) = cache.state[:, None], self._project_codes(prefix_UWl)
        keys_SHE, values_SHE, cuts_U1 = cache.get_history()
        q = self._compute_queries(state_U1D, prefix_UWl, level).unflatten(-1, (self.heads, -1))
        q = self._turn(q, cuts_U1.diff()[:, None] - 1)
        if torch.is_grad_enabled() and q.requires_grad:
            seen = _attend_packed(q, keys_SHE, values_SHE, cuts_U1, keys, values)
        else:
            seen = BeamCache(keys_SHE, values_SHE, cuts_U1, keys, values).attend(q)
        return self._logits(state_U1D + self.merge[level](seen.flatten(2)), prefix_UWl, level)

    def _compute_queries(self, state: Tensor, prefix: Tensor, level: int) -> Tensor:
        """Compute queries [.., D] before rotation, from one state per prefix.

        Either of them may be broadcast over the second dimension.
        """
        query = self.query[level](state)
        if level == 0:
            return query
        tables = self.sought[level]
        codes = [table(prefix[..., place]) for place, table in enumerate(tables)]  # type: ignore[arg-type]
        return query + sum(codes[1:], codes[0])  # codes first: for all prompts at once where they share them

    def _project_history(self, state_TD: Tensor, cuts_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values [T, H, E] of the states, rotated by their place in the sequence."""
        keys, values = self.remember(state_TD).unflatten(-1, (2, self.heads, -1)).unbind(1)
        number_T = torch.arange(len(state_TD), device=cuts_B1.device)
        return self._turn(keys, number_T - cuts_B1[_sequence(number_T, cuts_B1)]), values

    def _project_codes(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values [.., l, H, E] of the chosen codes [.., l]."""
        keys = [table(code) for table, code in zip(self.key, prefix.unbind(-1), strict=False)]
        values = [table(code) for table, code in zip(self.value, prefix.unbind(-1), strict=False)]
        if not keys:
            each = self.query[0].out_features // self.heads  # type: ignore[operator]
            nothing = self.query[0].weight.new_zeros(*prefix.shape, self.heads, each)  # type: ignore[operator]
            return nothing, nothing
        keys, values = (torch.stack(x, -2).unflatten(-1, (self.heads, -1)) for x in (keys, values))
        return pad(keys, (self.turning, 0)), values

    def _turn(self, x: Tensor, place: Tensor) -> Tensor:
        """Rotate the first part of each head of x [.., H, E] by its position [..], which is broadcast over further dimensions."""
        if not self.turning:
            return x
        cosine, sine = (t.view(*place.shape, 1, -1) for t in compute_rotary(place.flatten(), self.turning))
        return torch.cat([rotate(x[..., : self.turning], (cosine, sine)), x[..., self.turning :]], -1)


def _attend_packed(
    q_UWHE: Tensor, keys: Tensor, values: Tensor, cuts_U1: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    """Compute `BeamCache.attend` with gradients: each beam attends to its prompt's history and its own tokens [U, W, l, H, E]."""
    prompts, beams, length = len(q_UWHE), q_UWHE.shape[1], own_keys.shape[2]
    number_U1 = torch.arange(prompts + 1, device=cuts_U1.device)
    own = tuple(x.expand(prompts, *x.shape[1:]).flatten(0, 2) for x in (own_keys, own_values))
    keys, values, cu_k = _append_own((keys, values), cuts_U1, own, beams * length * number_U1)
    history_UW = cuts_U1.diff()[:, None].expand(-1, beams)
    line_UW = history_UW + length * torch.arange(beams, device=cuts_U1.device)
    start = torch.stack([torch.zeros_like(line_UW), line_UW], -1).flatten(0, 1)
    stop = torch.stack([history_UW, line_UW + length], -1).flatten(0, 1)
    seen = uni_attention(
        q_UWHE.flatten(0, 1),
        keys,
        values,
        mask=UniMask.intervals(start, stop),
        cu_seqlens_q=beams * number_U1,
        cu_seqlens_k=cu_k,
    )
    return seen.unflatten(0, (prompts, beams))


def _append_own(
    history: tuple[Tensor, ...], cuts_B1: Tensor, own: tuple[Tensor, ...], own_B1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack keys and values as [history of a sequence | its own tokens], and return them with their cuts."""
    number_T = torch.arange(len(history[0]), device=cuts_B1.device)
    number_S = torch.arange(len(own[0]), device=cuts_B1.device)
    at_T = number_T + own_B1[_sequence(number_T, cuts_B1)]
    at_S = number_S + cuts_B1[_sequence(number_S, own_B1) + 1]
    at, both = torch.cat([at_T, at_S]), (torch.cat(x) for x in zip(history, own, strict=True))
    keys, values = (torch.empty_like(x).index_copy(0, at, x) for x in both)
    return keys, values, cuts_B1 + own_B1


def _sequence(number: Tensor, cuts_B1: Tensor) -> Tensor:
    """Return the sequence of each packed token."""
    return torch.searchsorted(cuts_B1, number, right=True) - 1
