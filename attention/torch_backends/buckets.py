"""Buckets: short sequences of similar length in one padded call of torch's fused attention, forward and backward.

A batch of 20 sequences of 2 to 51 events takes one to three calls instead of 20. Padding never affects the result: padded
keys are masked, and padded rows are not read back. A blind row is a query that sees no key. Masks are at most 256 x 256 per
sequence, so memory stays O(N).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.masks import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, H heads, D width, B sequences of a bucket, Q and N the longest
# query and key run in it, K slots, t the bucket's query tokens.
_MIN_SEQUENCES = 4  # Minimum number of sequences of a bucket that ends because lengths have halved.
_BLIND_LSE = 1e30  # Log-sum-exp of a blind row in the backward, so that every weight is 0.
_MAX_SCORES = 1 << 23  # Maximum number of padded scores per call over all heads: 32 MB.

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, eq=False)
class BucketSide:
    """The tokens of a bucket, on the query or the key side.

    Attributes:
        token: Packed index of each token [t].
        slot: Index of each token in the flattened padded layout [t].
        filler: Packed index of each padded position [B * longest]; padding repeats a sequence's last token.
        longest: Length of the longest sequence.
        whole: Whether the bucket has every token of the batch, in order.
    """

    token: Tensor
    slot: Tensor
    filler: Tensor
    longest: int
    whole: bool

    def pad_with_last(self, x_THD: Tensor, sequences: int) -> Tensor:
        """Pad to [B, H, longest, D] by repeating each sequence's last token, so that padded scores stay finite."""
        return self._reshape(x_THD.index_select(0, self.filler), sequences)

    def pad_with_zeros(self, x_THD: Tensor, sequences: int) -> Tensor:
        """Pad to [B, H, longest, D] with zeros."""
        part = x_THD if self.whole else x_THD.index_select(0, self.token)
        flat = x_THD.new_zeros(sequences * self.longest, *x_THD.shape[1:])
        return self._reshape(flat.index_copy_(0, self.slot, part), sequences)

    def pack(self, x_BHQD: Tensor) -> Tensor:
        """Return the values of the bucket's tokens [t, H, D] from padded ones."""
        return x_BHQD.transpose(1, 2).reshape(-1, x_BHQD.shape[1], x_BHQD.shape[3]).index_select(0, self.slot)

    def _reshape(self, flat: Tensor, sequences: int) -> Tensor:
        """Convert [B * longest, H, D] to [B, H, longest, D]."""
        return flat.view(sequences, self.longest, *flat.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBucket:
    """Sequences that share a padded call.

    Attributes:
        sequences: The number of sequences B.
        query: The query tokens.
        key: The key tokens.
        causal: Whether the kernel's own causal mask is used; `mask_bias` is then None.
        mask_bias: Added to the scores, [B, 1, Q, N]: -inf for masked pairs, 0 for visible ones and in blind rows.
        blind: Which of the query tokens [t] are blind rows; None if none is.
    """

    sequences: int
    query: BucketSide
    key: BucketSide
    causal: bool
    mask_bias: Tensor | None
    blind: Tensor | None


def make_buckets(
    n_q: list[int], n_k: list[int], cu_q: Tensor, cu_k: Tensor, chosen: list[int], form: str,
    table: IntervalTable | None, heads: int,
) -> list[SequenceBucket]:  # fmt: skip
    """Divide some sequences into buckets.

    Args:
        n_q: The number of queries of each sequence.
        n_k: The number of keys of each sequence.
        cu_q: Cuts of the queries.
        cu_k: Cuts of the keys.
        chosen: The sequences to divide.
        form: The form of the mask: "full", "causal" or "table".
        table: The mask's interval table, if the form does not define it.
        heads: The number of query heads.
    """
    return [
        _make_bucket(torch.tensor(index, device=cu_q.device), cu_q, cu_k, form, table)
        for index in group_sequences(n_q, n_k, chosen, heads, _MAX_SCORES)
    ]


def group_sequences(
    n_q: list[int], n_k: list[int], chosen: list[int], heads: int, max_scores: int
) -> Iterator[list[int]]:
    """Yield groups of sequences (in their packed order) that share a call of at most `max_scores` padded scores.

    The sequences `chosen` are taken by descending length. A group ends where lengths have halved, or when it is full.
    """
    order = [b for b in sorted(chosen, key=lambda b: (-n_k[b], -n_q[b])) if n_q[b] and n_k[b]]
    begin = 0
    for end in range(1, len(order) + 1):
        remaining, count = len(order) - end, end - begin
        longest = n_k[order[begin]]
        is_halved = remaining >= _MIN_SEQUENCES and count >= _MIN_SEQUENCES and 2 * n_k[order[end]] <= longest
        is_full = heads * (count + 1) * longest * max(n_q[b] for b in order[begin:end]) > max_scores
        if remaining == 0 or is_halved or is_full:
            yield sorted(order[begin:end])
            begin = end


def _make_bucket(
    index_B: Tensor, cu_q: Tensor, cu_k: Tensor, form: str, table: IntervalTable | None
) -> SequenceBucket:
    """Create a bucket of padded sequences, with an additive mask unless it is causal."""
    same_cuts = cu_k is cu_q
    cuts_q, cuts_k = cu_q.long(), cu_k.long()
    query = make_side(cuts_q, index_B)
    key = query if same_cuts else make_side(cuts_k, index_B)
    if form == "causal" and same_cuts:
        return SequenceBucket(len(index_B), query, key, True, None, None)
    seen_BQN = compute_bucket_mask(index_B, cuts_q, cuts_k, query.longest, key.longest, table)
    blind_BQ = ~seen_BQN.any(-1)
    blind_t = blind_BQ.flatten()[query.slot]
    mask_bias = torch.zeros(seen_BQN.shape, device=seen_BQN.device)
    mask_bias = mask_bias.masked_fill_(~(seen_BQN | blind_BQ[..., None]), -torch.inf)
    return SequenceBucket(
        len(index_B), query, key, False, mask_bias[:, None], blind_t if bool(blind_t.any()) else None
    )


def make_side(cuts: Tensor, index_B: Tensor) -> BucketSide:
    """Locate the tokens of the sequences `index_B` in the packed batch and in the padded layout."""
    start_B, length_B = cuts[index_B], cuts.diff()[index_B]
    longest = int(length_B.max())
    place_BQ = torch.arange(longest, device=cuts.device).expand(len(index_B), longest)
    slot = (place_BQ < length_B[:, None]).flatten().nonzero().squeeze(1)
    filler = (start_B[:, None] + torch.minimum(place_BQ, length_B[:, None] - 1)).flatten()
    token = filler[slot]
    return BucketSide(token, slot, filler, longest, len(token) == int(cuts[-1]))


def compute_bucket_mask(
    index_B: Tensor, cuts_q: Tensor, cuts_k: Tensor, rows: int, keys: int, table: IntervalTable | None
) -> Tensor:
    """Compute the mask of the sequences `index_B`, bool [B, Q, N], true for visible pairs and false in padding.

    `rows` is Q and `keys` is N. Without a table, every key of the own sequence is visible.
    """
    row_Q1 = torch.arange(rows, device=index_B.device)[:, None]
    key_N = torch.arange(keys, device=index_B.device)
    n_q, n_k = cuts_q.diff()[index_B], cuts_k.diff()[index_B]
    inside = (row_Q1 < n_q[:, None, None]) & (key_N < n_k[:, None, None])
    if table is None:
        return inside
    token_BQ = (cuts_q[index_B][:, None] + row_Q1[:, 0]).clamp_max(table.start.shape[1] - 1)
    seen = (
        (key_N >= table.start[:, token_BQ][..., None]) & (key_N < table.stop[:, token_BQ][..., None])
    ).any(0) & inside
    token_BN = (cuts_k[index_B][:, None] + key_N).clamp_max(int(cuts_k[-1]) - 1)
    if table.column_start is not None and table.column_stop is not None:
        seen &= (row_Q1 >= table.column_start[token_BN][:, None]) & (
            row_Q1 < table.column_stop[token_BN][:, None]
        )
    if table.sees is not None and table.word is not None:
        seen &= (table.sees[token_BQ][..., None] & table.word[token_BN][:, None]) != 0
    return seen


def forward(bucket: SequenceBucket, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute outputs [t, H, D] and log-sum-exp [t, H] of the bucket's query tokens."""
    mask_bias = None if bucket.mask_bias is None else bucket.mask_bias.to(q.dtype)
    out_BHQD, lse_BHQ = _flash(
        bucket.query.pad_with_last(q, bucket.sequences),
        bucket.key.pad_with_last(k, bucket.sequences),
        bucket.key.pad_with_last(v, bucket.sequences),
        0.0,  # No dropout.
        bucket.causal,
        attn_mask=mask_bias,
        scale=scale,
    )
    out, lse = bucket.query.pack(out_BHQD), bucket.query.pack(lse_BHQ[..., None])[..., 0]
    if bucket.blind is not None:
        out.masked_fill_(bucket.blind[:, None, None], 0.0)
        lse.masked_fill_(bucket.blind[:, None], -torch.inf)
    return out, lse


def backward(
    bucket: SequenceBucket,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the bucket's queries, keys and values, each [t, H, D] in lse's dtype; 0 for blind rows."""
    # Half precision is slower at these lengths.
    grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, q, k, v, out))
    mask_bias = None if bucket.mask_bias is None else bucket.mask_bias.to(q.dtype)
    n = bucket.sequences
    if bucket.blind is not None:
        lse = lse.index_fill(0, bucket.query.token[bucket.blind], _BLIND_LSE)
    grads = _flash_backward(
        bucket.query.pad_with_zeros(grad, n),
        bucket.query.pad_with_last(q, n),
        bucket.key.pad_with_last(k, n),
        bucket.key.pad_with_last(v, n),
        bucket.query.pad_with_last(out, n),
        bucket.query.pad_with_last(lse[..., None], n)[..., 0],
        0.0,  # No dropout.
        bucket.causal,
        attn_mask=mask_bias,
        scale=scale,
    )
    return bucket.query.pack(grads[0]), bucket.key.pack(grads[1]), bucket.key.pack(grads[2])
