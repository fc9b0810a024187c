"""Prefix: the stored intermediate results of a history, with which a decoder computes later events alone.

A prefix holds the keys and values of every block, rotated by position, and the states. Later events get the same result as if
the whole history were computed at once: attention is causal, and positions do not change while the window of events keeps its
beginning.
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

# Shapes: B sequences, N new events, T new positions, S stored positions, n positions of one prefix, J blocks, D width, H heads,
# E = D / H.


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The stored results of one sequence's start position and events.

    Attributes:
        kv: Keys and values [J, 2, n, H, E] of every block.
        states: Final states [n, D].
        time: Unix seconds of the newest event, -1 if there is none.
    """

    kv: Tensor
    states: Tensor
    time: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.kv.nbytes + self.states.nbytes


class PrefixModel(Protocol):
    """The attributes of a decoder that `extend` uses."""

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
        """The depth decoder, whose `cache` builds the result of a prefill from states."""
        ...

    def embed_inputs(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], previous_time_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embed events [N, D] and start positions [B, D]."""
        ...


def extend(
    model: PrefixModel,
    batch: SampleBatch,
    rows: Mapping[str, Tensor],
    prefixes: Sequence[CachedPrefix | None],
) -> tuple[DecoderCache, list[CachedPrefix]]:
    """Compute the prefill of stored prefixes followed by new events.

    Args:
        model: The decoder.
        batch: The events of each sequence after its prefix, or all of them if it has no prefix.
        rows: Rows of the sparse features of `batch`.
        prefixes: Prefix of each sequence; None for none.

    Returns:
        The cache that steps need, and the prefix of each sequence with the new events.
    """
    offsets, device = batch.item.offsets, batch.item.offsets.device
    is_new_B = torch.tensor([prefix is None for prefix in prefixes], device=device)
    previous_times = [-1 if prefix is None else prefix.time for prefix in prefixes]
    past_lengths = [0 if prefix is None else len(prefix.states) for prefix in prefixes]
    past_cuts_B1 = torch.tensor([0, *past_lengths], device=device).cumsum(0)
    new_cuts_B1 = offsets + torch.nn.functional.pad(is_new_B.long().cumsum(0), (1, 0))
    cuts_B1 = past_cuts_B1 + new_cuts_B1
    stored = [prefix for prefix in prefixes if prefix is not None]
    states_SD, kv_JSHE = None, None
    if stored:
        states_SD = torch.cat([prefix.states for prefix in stored])
        kv_JSHE = torch.cat([prefix.kv for prefix in stored], 2)
    n_new = int(new_cuts_B1[-1])
    if n_new:
        past = PastKeyValues.from_offsets(kv_JSHE, past_cuts_B1, new_cuts_B1)
        previous_time_B = torch.tensor(previous_times, device=device)
        x_TD = model.norm(
            _run_blocks(model, batch, rows, is_new_B, previous_time_B, past_cuts_B1, new_cuts_B1, past)
        )
        states = x_TD if states_SD is None else past.join(states_SD, x_TD)
        kv_by_block = past.kv_by_block
    else:
        assert states_SD is not None
        assert kv_JSHE is not None
        states, kv_by_block = states_SD, []
    event_cuts, position_cuts = offsets.tolist(), cuts_B1.tolist()
    time_N = batch.time.values.tolist()
    longer_prefixes = []
    for b, prefix in enumerate(prefixes):
        if prefix is not None and event_cuts[b] == event_cuts[b + 1]:
            longer_prefixes.append(prefix)
            continue
        rows_of_sequence = slice(position_cuts[b], position_cuts[b + 1])
        newest_time = (
            time_N[event_cuts[b + 1] - 1] if event_cuts[b + 1] > event_cuts[b] else previous_times[b]
        )
        kv = torch.stack(
            [x[rows_of_sequence] for key_and_value in kv_by_block for x in key_and_value]
        ).unflatten(0, (len(kv_by_block), 2))
        longer_prefixes.append(CachedPrefix(kv, states[rows_of_sequence].clone(), newest_time))
    return model.depth.cache(states, cuts_B1), longer_prefixes


def _run_blocks(
    model: PrefixModel,
    batch: SampleBatch,
    rows: Mapping[str, Tensor],
    is_new_B: Tensor,
    previous_time_B: Tensor,
    past_cuts_B1: Tensor,
    new_cuts_B1: Tensor,
    past: PastKeyValues,
) -> Tensor:
    """Embed the new positions, and return the output [T, D] of the last block for them, before the final norm."""
    offsets = batch.item.offsets
    sequence_N = torch.repeat_interleave(offsets.diff())
    place_N = torch.arange(len(sequence_N), device=offsets.device) - offsets[sequence_N]
    row_N = new_cuts_B1[sequence_N] + is_new_B[sequence_N] + place_N
    event_ND, start_BD = model.embed_inputs(batch, rows, previous_time_B)
    x_TD = start_BD.new_zeros(int(new_cuts_B1[-1]), start_BD.shape[-1])
    x_TD = x_TD.index_copy(0, new_cuts_B1[:-1][is_new_B], start_BD[is_new_B]).index_copy(0, row_N, event_ND)
    position_T = torch.zeros(len(x_TD), dtype=torch.int64, device=offsets.device)
    position_T = position_T.index_copy(
        0, row_N, past_cuts_B1.diff()[sequence_N] + is_new_B[sequence_N] + place_N
    )
    rotation = compute_rotary(position_T, model.head_width)
    for number, block in enumerate(model.blocks):
        x_TD = block(x_TD, new_cuts_B1, rotation, past.select_block(number))
    return x_TD
