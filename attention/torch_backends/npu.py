"""The Ascend backend of uni_attention: torch_npu's fused attention, one sequence per call. It was never run on Ascend hardware.

It is written from torch_npu's documentation and tested on a CPU with a replacement of torch_npu. Causal calls use a compressed
triangular mask, calls with an interval table a bool mask of one sequence, full attention no mask; so no mask is larger than the
square of the longest sequence. The backward recomputes each sequence and differentiates it with autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nonet.attention.calls import AttentionCall
from nonet.attention.masks import compute_visible
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, H query heads, D width; n queries and m keys of a sequence.
DEVICE = "npu"
_TRIANGLE = 2048  # Side of the compressed causal mask that sparse_mode 3 requires.
# Values of sparse_mode: a mask of the whole sequence; causal, with the last query aligned to the last key.
_WHOLE, _BOTTOM_RIGHT = 0, 3


def is_available(q: Tensor, v: Tensor, call: AttentionCall) -> bool:
    """Return whether the fused kernel supports this call; other calls use the chunked reference."""
    return (
        q.device.type == DEVICE
        and call.plain
        and call.sink is None
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[-1] == v.shape[-1]
    )


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute output [T, H, D] and log-sum-exp [T, H] float32."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for rows, keys, options, blind_rows in _iterate_sequences(call, len(q), len(k)):
        part, part_lse = _run_fused(q[rows], k[keys], v[keys], call.scale, options)
        out[rows] = part.masked_fill(blind_rows[:, None, None], 0.0)
        lse[rows] = part_lse.masked_fill(blind_rows[:, None], -torch.inf)
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> list[Tensor | None]:
    """Compute the gradients of q, k and v; None for the sink and tables, which this backend does not support."""
    packed_gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, options, blind_rows in _iterate_sequences(call, len(q), len(k)):
        token_slices = (rows, keys, keys)
        leaves = [x[i].detach().requires_grad_() for x, i in zip((q, k, v), token_slices, strict=True)]
        with torch.enable_grad():
            part, _ = _run_fused(leaves[0], leaves[1], leaves[2], call.scale, options)
            gradients = torch.autograd.grad(
                part, leaves, grad[rows].masked_fill(blind_rows[:, None, None], 0.0)
            )
        for packed, i, gradient in zip(packed_gradients, token_slices, gradients, strict=True):
            packed[i] = gradient
    return [*packed_gradients, None, None, None]


def _run_fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run the fused kernel on one sequence and return its output [n, H, D] and log-sum-exp [n, H].

    The kernel returns row maxima and sums of exponentials, each [1, H, n, 8]; the first of the 8 entries is used.
    """
    try:
        import torch_npu  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"attention on an Ascend device needs torch_npu ({error}); pip install 'nonet[npu]'."
        ) from error
    batched = (x.transpose(0, 1)[None] for x in (q, k, v))
    outputs = torch_npu.npu_fusion_attention(*batched, q.shape[1], "BNSD", scale=scale, **options)
    lse_HN = outputs[1][0, :, :, 0] + outputs[2][0, :, :, 0].log()
    return outputs[0][0].transpose(0, 1), lse_HN.T


def _iterate_sequences(
    call: AttentionCall, tokens_q: int, tokens_k: int
) -> Iterator[tuple[slice, slice, dict[str, Any], Tensor]]:
    """Iterate over the sequences that have queries and keys.

    Yields:
        The sequence's slices of the packed queries and keys, the mask options of the fused kernel (True in `atten_mask` hides a
        key), and a bool tensor [n] of the queries that see no key.
    """
    table = call.build_table(tokens_q, tokens_k)
    cu_q, cu_k, device = table.cu_q.tolist(), table.cu_k.tolist(), table.start.device
    triangle = None
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        query_index, key_index = (torch.arange(s.stop - s.start, device=device) for s in (rows, keys))
        if not len(query_index) or not len(key_index):
            continue
        if call.form != "table":
            no_blind_rows = torch.zeros(len(query_index), dtype=torch.bool, device=device)
            if call.form == "causal" and triangle is None:
                triangle = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)
            options = {"atten_mask": triangle, "sparse_mode": _BOTTOM_RIGHT} if call.form == "causal" else {}
            yield rows, keys, options, no_blind_rows
            continue
        seen = compute_visible(
            table, query_index + rows.start, key_index + keys.start, query_index, key_index
        )
        blind_rows = ~seen.any(1)
        # Rows without visible keys get all keys, else the kernel divides by zero.
        hidden = ~(seen | blind_rows[:, None])
        yield rows, keys, {"atten_mask": hidden, "sparse_mode": _WHOLE}, blind_rows
