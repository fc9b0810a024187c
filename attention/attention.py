"""uni_attention: softmax attention over packed sequences, under a mask that is data.

Sequences of like length share one padded call of torch's fused SDPA, forward and backward, so a batch of 20 windows of
2 to 51 events is one to three calls instead of 20. Padding never reaches the result: padded keys are masked and padded
rows are not read back. The signature is final; kernels that read the intervals directly slot in behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nonet.attention.mask import IntervalMask, Mask
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, H heads, D head width, E value width, B sequences of a bucket,
# Q and N the longest query and key run in it, K intervals a row.
_FEW = 4  # a bucket of fewer sequences costs more in calls than it saves in padding


def uni_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | IntervalMask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of packed queries [T, H, D] over packed keys [S, H, D] and values [S, H, E] -> [T, H, E].

    cu_seqlens_q [B + 1] cuts the queries into sequences, cu_seqlens_k the keys (the same cuts when left out). A query
    sees keys of its own sequence only, those the mask allows; with none it gives 0. scale: 1 / sqrt(D) when left out.
    """
    cuts_q = cu_seqlens_q.long()
    cuts_k = cuts_q if cu_seqlens_k is None else cu_seqlens_k.long()
    _check(q, k, v, mask, cuts_q, cuts_k)
    parts, places = [], []
    for index in _buckets(cuts_q.diff().tolist(), cuts_k.diff().tolist()):
        part, place = _bucket(q, k, v, mask, cuts_q, cuts_k, index.to(q.device), scale)
        parts.append(part)
        places.append(place)
    if len(parts) == 1 and len(places[0]) == len(q):
        return parts[0]
    out = q.new_zeros(len(q), q.shape[1], v.shape[-1])
    return out.index_copy(0, torch.cat(places), torch.cat(parts)) if parts else out


def _buckets(n_q: list[int], n_k: list[int]) -> Iterator[Tensor]:
    """Sequences that share a call, in their packed order; a bucket ends where lengths have halved."""
    order = [b for b in sorted(range(len(n_q)), key=lambda b: (-n_k[b], -n_q[b])) if n_q[b] and n_k[b]]
    begin = 0
    for at in range(1, len(order) + 1):
        rest = len(order) - at
        if rest == 0 or (rest >= _FEW and at - begin >= _FEW and 2 * n_k[order[at]] <= n_k[order[begin]]):
            yield torch.tensor(sorted(order[begin:at]))
            begin = at


def _bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    cuts_q: Tensor,
    cuts_k: Tensor,
    index_B: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [t, H, E] of the bucket's query tokens, and their places [t] among the packed ones."""
    same = cuts_k is cuts_q
    n_q_B, n_k_B = cuts_q.diff()[index_B], cuts_k.diff()[index_B]
    token_q, slot_q, rows = _slots(cuts_q[index_B], n_q_B)
    token_k, slot_k, keys = (token_q, slot_q, rows) if same else _slots(cuts_k[index_B], n_k_B)
    shape = (len(index_B), rows, keys)
    plain = same and isinstance(mask, Mask) and mask.causal and mask.window is None
    seen_BQN = None if plain else _visible(mask, cuts_q[index_B], n_q_B, n_k_B, shape)
    blind_BQ = None if seen_BQN is None else ~seen_BQN.any(-1)
    if seen_BQN is not None and blind_BQ is not None:
        seen_BQN = seen_BQN | blind_BQ[..., None]  # a row that sees nothing must not divide by zero
    out_BHQE = scaled_dot_product_attention(
        _padded(q, token_q, slot_q, len(index_B), rows),
        _padded(k, token_k, slot_k, len(index_B), keys),
        _padded(v, token_k, slot_k, len(index_B), keys),
        attn_mask=None if seen_BQN is None else seen_BQN[:, None],
        is_causal=plain,
        scale=scale,
    )
    out_tHE = out_BHQE.transpose(1, 2).flatten(0, 1).index_select(0, slot_q)
    if blind_BQ is not None:
        out_tHE = out_tHE.masked_fill(blind_BQ.flatten()[slot_q][:, None, None], 0.0)
    return out_tHE, token_q


def _slots(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, int]:
    """Packed token and padded slot of every token of these sequences, and the padded length."""
    longest = int(length_B.max())
    place_BQ = torch.arange(longest, device=start_B.device).expand(len(start_B), longest)
    slot = (place_BQ < length_B[:, None]).flatten().nonzero().squeeze(1)
    return (start_B[:, None] + place_BQ).flatten()[slot], slot, longest


def _padded(x_THD: Tensor, token: Tensor, slot: Tensor, sequences: int, longest: int) -> Tensor:
    """[B, H, longest, D], zeros behind each sequence."""
    part = x_THD if len(token) == len(x_THD) else x_THD.index_select(0, token)
    flat = x_THD.new_zeros(sequences * longest, *x_THD.shape[1:])
    return flat.index_copy(0, slot, part).view(sequences, longest, *x_THD.shape[1:]).transpose(1, 2)


def _visible(mask: Any, start_B: Tensor, n_q_B: Tensor, n_k_B: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B, Q, N] bool: the union of each row's intervals."""
    _, rows, keys = shape
    start_BQK, stop_BQK = mask.intervals(n_q_B, n_k_B, rows, start_B)
    key_N = torch.arange(keys, device=n_q_B.device)
    return ((key_N >= start_BQK[..., None]) & (key_N < stop_BQK[..., None])).any(2)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Any, cuts_q: Tensor, cuts_k: Tensor) -> None:
    if not isinstance(mask, Mask | IntervalMask):
        raise ConfigError(
            f"uni_attention cannot express the mask {type(mask).__name__}; it takes full(), causal(window=...) or "
            "intervals(start, stop) of nonet.attention.mask."
        )
    if isinstance(mask, IntervalMask) and len(mask.start) != len(q):
        raise ConfigError(f"the mask has intervals for {len(mask.start)} queries, there are {len(q)}.")
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or len(k) != len(v) or q.shape[1:] != k.shape[1:]:
        raise ConfigError(
            f"uni_attention takes q [T, H, D], k [S, H, D] and v [S, H, E], packed; got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}."
        )
    for name, cuts, tokens in (("q", cuts_q, len(q)), ("k", cuts_k, len(k))):
        if (
            cuts.ndim != 1
            or not len(cuts)
            or int(cuts[0])
            or int(cuts[-1]) != tokens
            or bool((cuts.diff() < 0).any())
        ):
            raise ConfigError(
                f"cu_seqlens_{name} must rise from 0 to the {tokens} tokens of {name}; got {cuts[:8].tolist()}"
                f"{' ...' if len(cuts) > 8 else ''}."
            )
    if len(cuts_q) != len(cuts_k):
        raise ConfigError(f"{len(cuts_q) - 1} query sequences but {len(cuts_k) - 1} key sequences.")
