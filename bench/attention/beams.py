"""`nonet bench beams`: beam search over a KV cache with one shared prompt, compared with a cache that repeats the prompt.

There are 2 prompts of 1,000 tokens, 64 beams and 3 levels, on one CPU thread. At each level, both sides reorder their beams,
append a token and attend with one query per beam. The side "shared" is `BeamCache`. The side "repeated" is beam search over a
static cache: every beam has its own copy of the prompt's keys and values, preallocated in the layout that is fastest for SDPA,
and reordering gathers them. "attention repeated" omits this reordering, so it is a lower bound for all caches with a copy per
beam; it is compared with the whole decode of "shared". The outputs of both sides are compared before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nonet.bench.timing import measure_milliseconds

# Shapes: U prompts, W beams, L levels, N tokens of a prompt, H query heads, G key heads, D width.
_PROMPTS, _BEAMS, _LEVELS, _TOKENS = 2, 64, 3, 1000
_HEADS, _WIDTH = 4, 64
_ROUNDS = 9


def bench_attention_beams() -> dict[str, Any]:
    """Measure the milliseconds of a decode of three levels, by dtype and key heads; ratios above 1 favour the shared cache."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            _compare_sides(getattr(torch, dtype), key_heads)
            for dtype in ("float32", "bfloat16")
            for key_heads in (_HEADS, 1)
        ]
    finally:
        torch.set_num_threads(threads)
    names = ("decode repeated/shared", "attention repeated/shared", "decode repeated/shared, CPU time")
    return {"rows": rows, "ratio": {f"{name}, least": min(row[name] for row in rows) for name in names}}


def _compare_sides(dtype: Any, key_heads: int) -> dict[str, Any]:
    """Compare both sides for one dtype and number of key heads, after checking that their outputs agree."""
    import torch

    tensors = _draw_tensors(dtype, key_heads)
    shared, repeated = _make_shared_decode(tensors), _make_repeated_decode(tensors, reorder=True)
    for actual, expected in zip(shared(), repeated(), strict=True):
        torch.testing.assert_close(
            actual, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2
        )
    sides = {
        "decode shared": shared,
        "decode repeated": repeated,
        "attention repeated": _make_repeated_decode(tensors, reorder=False),
    }
    times = measure_milliseconds(sides, _ROUNDS)
    row: dict[str, Any] = {"type": str(dtype).removeprefix("torch."), "heads": _HEADS, "key heads": key_heads}
    row |= {f"{side} ms": round(times[side], 3) for side in sides}
    for step in ("decode", "attention"):
        row[f"{step} repeated/shared"] = times[f"{step} repeated"] / times["decode shared"]
    row["decode repeated/shared, CPU time"] = times["decode repeated CPU"] / times["decode shared CPU"]
    token_bytes = 2 * key_heads * _WIDTH * dtype.itemsize
    row["shared cache MB"] = _PROMPTS * (_TOKENS + _BEAMS * _LEVELS) * token_bytes / 1e6
    row["repeated cache MB"] = _PROMPTS * _BEAMS * (_TOKENS + _LEVELS) * token_bytes / 1e6
    return row


def _draw_tensors(dtype: Any, key_heads: int) -> dict[str, Any]:
    """Draw the tensors of a decode.

    Returns:
        `prompt`: keys and values [U, N, G, D]; `q`: queries [L, U, W, H, D]; `own`: keys and values of the beams' tokens
        [L, U, W, G, D]; `parents`: for each beam the beam that it continues [L, U, W].
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    parents = torch.randint(0, _BEAMS, (_LEVELS, _PROMPTS, _BEAMS), generator=generator)
    return {
        "prompt": [draw(_PROMPTS, _TOKENS, key_heads, _WIDTH) for _ in range(2)],
        "q": draw(_LEVELS, _PROMPTS, _BEAMS, _HEADS, _WIDTH),
        "own": [draw(_LEVELS, _PROMPTS, _BEAMS, key_heads, _WIDTH) for _ in range(2)],
        "parents": parents,
    }


def _make_shared_decode(tensors: dict[str, Any]) -> Callable[[], list[Any]]:
    """Return the decode of a cache with one shared prompt."""
    import torch

    from nonet.attention import BeamCache

    keys, values = (x.flatten(0, 1) for x in tensors["prompt"])
    cuts = torch.arange(_PROMPTS + 1) * _TOKENS

    def decode() -> list[Any]:
        cache, out = BeamCache(keys, values, cuts), []
        for level in range(_LEVELS):
            if level:
                cache.reorder_beams(tensors["parents"][level])
            cache.append(tensors["own"][0][level], tensors["own"][1][level])
            out.append(cache.attend(tensors["q"][level]))
        return out

    return decode


def _make_repeated_decode(tensors: dict[str, Any], reorder: bool) -> Callable[[], list[Any]]:
    """Return the decode of a cache in which every beam has the whole prompt.

    The cache [U * W, G, N + L, D] is written in place, and gathered if beams are reordered.
    """
    import torch
    from torch.nn.functional import pad, scaled_dot_product_attention

    caches = [
        pad(x.transpose(1, 2), (0, 0, 0, _LEVELS)).repeat_interleave(_BEAMS, 0).contiguous()
        for x in tensors["prompt"]
    ]
    first_beam = torch.arange(_PROMPTS)[:, None] * _BEAMS

    @torch.no_grad()
    def decode() -> list[Any]:
        current, out = list(caches), []
        for level in range(_LEVELS):
            if reorder and level:
                parent = (first_beam + tensors["parents"][level]).flatten()
                current = [cache.index_select(0, parent) for cache in current]
            length = _TOKENS + level + 1
            for cache, own in zip(current, tensors["own"], strict=True):
                cache[:, :, length - 1] = own[level].flatten(0, 1)
            q = tensors["q"][level].flatten(0, 1)[:, :, None]
            keys, values = (cache[:, :, :length] for cache in current)
            attended = scaled_dot_product_attention(q, keys, values, enable_gqa=keys.shape[1] != _HEADS)
            out.append(attended[:, :, 0].unflatten(0, (_PROMPTS, _BEAMS)))
        return out

    return decode
