"""Prefix: what a decoder keeps of a history, so that events after it are computed alone.

Keys and values of every block, each turned by its place, and the states: a later event sees them as if all were computed at
once, since attention is causal and a place in the window does not move while the window stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.sid_decoder.blocks import PastKeyValues, compute_rotary
from nonet.types import SampleBatch

# Shapes: B sequences, N new events, T new positions, S kept positions, n of one sequence, J blocks, D width, H heads, E = D / H.


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Keys and values [J, 2, n, H, E] and states [n, D] of a start and the events after it; time of the newest, -1 for none."""

    kv: Tensor
    states: Tensor
    time: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.kv.nbytes + self.states.nbytes


class PrefixModel(Protocol):
    """What `extend` needs of a decoder."""

    head_width: int

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order."""
        ...

    @property
    def norm(self) -> nn.Module:
        """The norm after the last block."""
        ...

    @property
    def depth(self) -> Any:
        """The depth decoder, which caches states."""
        ...

    def embed_inputs(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], before_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embed events [N, D] and start positions [B, D]."""
        ...


def extend(
    model: PrefixModel, batch: SampleBatch, rows: Mapping[str, Tensor], kept: Sequence[CachedPrefix | None]
) -> tuple[DecoderCache, list[CachedPrefix]]:
    """Compute the prefill of stored prefixes together with new events, and the longer prefixes.

    `batch` holds the events of each sequence after its prefix, or all of them if there is no prefix.
    """
    offsets, device = batch.item.offsets, batch.item.offsets.device
    fresh_B = torch.tensor([prefix is None for prefix in kept], device=device)
    lengths = [0 if prefix is None else len(prefix.states) for prefix in kept]
    past_B1 = torch.tensor([0, *lengths], device=device).cumsum(0)
    new_B1 = offsets + torch.nn.functional.pad(fresh_B.long().cumsum(0), (1, 0))
    both_B1 = past_B1 + new_B1
    known = [prefix for prefix in kept if prefix is not None]
    states_SD, kv_JSHE = None, None
    if known:
        states_SD = torch.cat([prefix.states for prefix in known])
        kv_JSHE = torch.cat([prefix.kv for prefix in known], 2)
    total = int(new_B1[-1])
    if total:
        past = PastKeyValues.of(kv_JSHE, past_B1, new_B1)
        before_B = torch.tensor([-1 if prefix is None else prefix.time for prefix in kept], device=device)
        x_TD = model.norm(_run_blocks(model, batch, rows, fresh_B, before_B, past_B1, new_B1, past))
        states = x_TD if states_SD is None else past.join(states_SD, x_TD)
        seen = past.seen
    else:
        assert states_SD is not None
        assert kv_JSHE is not None
        states, seen = states_SD, []
    times = [-1 if prefix is None else prefix.time for prefix in kept]
    ends, cuts = offsets.tolist(), both_B1.tolist()
    time_N = batch.time.values.tolist()
    longer = []
    for b, prefix in enumerate(kept):
        if prefix is not None and ends[b] == ends[b + 1]:
            longer.append(prefix)
            continue
        part = slice(cuts[b], cuts[b + 1])
        newest = time_N[ends[b + 1] - 1] if ends[b + 1] > ends[b] else times[b]
        kv = torch.stack([x[part] for each in seen for x in each]).unflatten(0, (len(seen), 2))
        longer.append(CachedPrefix(kv, states[part].clone(), newest))
    return model.depth.cache(states, both_B1), longer


def _run_blocks(
    model: PrefixModel,
    batch: SampleBatch,
    rows: Mapping[str, Tensor],
    fresh_B: Tensor,
    before_B: Tensor,
    past_B1: Tensor,
    new_B1: Tensor,
    past: PastKeyValues,
) -> Tensor:
    """Run all blocks on the new positions [T, D], without the final norm."""
    offsets = batch.item.offsets
    sequence_N = torch.repeat_interleave(offsets.diff())
    place_N = torch.arange(len(sequence_N), device=offsets.device) - offsets[sequence_N]
    at_N = new_B1[sequence_N] + fresh_B[sequence_N] + place_N
    event_ND, start_BD = model.embed_inputs(batch, rows, before_B)
    x_TD = start_BD.new_zeros(int(new_B1[-1]), start_BD.shape[-1])
    x_TD = x_TD.index_copy(0, new_B1[:-1][fresh_B], start_BD[fresh_B]).index_copy(0, at_N, event_ND)
    turn_T = torch.zeros(len(x_TD), dtype=torch.int64, device=offsets.device)
    turn_T = turn_T.index_copy(0, at_N, past_B1.diff()[sequence_N] + fresh_B[sequence_N] + place_N)
    turn = compute_rotary(turn_T, model.head_width)
    for number, block in enumerate(model.blocks):
        x_TD = block(x_TD, new_B1, turn, past.select_layer(number))
    return x_TD
