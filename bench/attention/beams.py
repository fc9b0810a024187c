"""`nonet bench beams`: decoding beams from one shared prompt against a cache that repeats it for each beam.

2 prompts of 1,000 tokens, 64 beams, 3 levels, on one CPU thread. Both sides reorder their beams, take a token and attend
with one query a beam. The other side is what beam search over a static cache does: every beam has the prompt's keys and
values, preallocated and in the layout that SDPA likes best; reordering gathers them. "attention repeated" leaves its reordering
out: the least that any cache of whole sequences costs, set against all of ours.
Outputs are compared before the clock starts.
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
    """Measure the milliseconds of a decode of three levels, by type and key heads; ratios above 1 favour Nonet."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            _compare_sides(getattr(torch, dtype), groups)
            for dtype in ("float32", "bfloat16")
            for groups in (_HEADS, 1)
        ]
    finally:
        torch.set_num_threads(threads)
    names = ("decode repeated/shared", "attention repeated/shared", "decode repeated/shared, CPU time")
    return {"rows": rows, "ratio": {f"{name}, least": min(row[name] for row in rows) for name in names}}


def _compare_sides(dtype: Any, groups: int) -> dict[str, Any]:
    """Compare both sides for one dtype and number of key heads, after checking that their outputs agree."""
    import torch

    tensors = _draw_tensors(dtype, groups)
    ours, theirs = _make_shared_decode(tensors), _make_repeated_decode(tensors, follow=True)
    for one, other in zip(ours(), theirs(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    sides = {
        "decode shared": ours,
        "decode repeated": theirs,
        "attention repeated": _make_repeated_decode(tensors, follow=False),
    }
    times = measure_milliseconds(sides, _ROUNDS)
    row: dict[str, Any] = {"type": str(dtype).removeprefix("torch."), "heads": _HEADS, "key heads": groups}
    row |= {f"{side} ms": round(times[side], 3) for side in sides}
    for step in ("decode", "attention"):
        row[f"{step} repeated/shared"] = times[f"{step} repeated"] / times["decode shared"]
    row["decode repeated/shared, CPU time"] = times["decode repeated CPU"] / times["decode shared CPU"]
    token = 2 * groups * _WIDTH * dtype.itemsize
    row["shared cache MB"] = _PROMPTS * (_TOKENS + _BEAMS * _LEVELS) * token / 1e6
    row["repeated cache MB"] = _PROMPTS * _BEAMS * (_TOKENS + _LEVELS) * token / 1e6
    return row


def _draw_tensors(dtype: Any, groups: int) -> dict[str, Any]:
    """Draw a prompt's keys and values [U, N, G, D], and for every level queries [U, W, H, D], keys, values and parents [U, W]."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    parents = torch.randint(0, _BEAMS, (_LEVELS, _PROMPTS, _BEAMS), generator=generator)
    return {
        "prompt": [draw(_PROMPTS, _TOKENS, groups, _WIDTH) for _ in range(2)],
        "q": draw(_LEVELS, _PROMPTS, _BEAMS, _HEADS, _WIDTH),
        "own": [draw(_LEVELS, _PROMPTS, _BEAMS, groups, _WIDTH) for _ in range(2)],
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


def _make_repeated_decode(tensors: dict[str, Any], follow: bool) -> Callable[[], list[Any]]:
    """Return the decode of a cache in which every beam has the whole prompt.

    The cache [U * W, G, N + L, D] is written in place and gathered when beams are reordered.
    """
    import torch
    from torch.nn.functional import pad, scaled_dot_product_attention

    caches = [
        pad(x.transpose(1, 2), (0, 0, 0, _LEVELS)).repeat_interleave(_BEAMS, 0).contiguous()
        for x in tensors["prompt"]
    ]
    first = torch.arange(_PROMPTS)[:, None] * _BEAMS

    @torch.no_grad()
    def decode() -> list[Any]:
        now, out = list(caches), []
        for level in range(_LEVELS):
            if follow and level:
                parent = (first + tensors["parents"][level]).flatten()
                now = [cache.index_select(0, parent) for cache in now]
            length = _TOKENS + level + 1
            for cache, own in zip(now, tensors["own"], strict=True):
                cache[:, :, length - 1] = own[level].flatten(0, 1)
            q = tensors["q"][level].flatten(0, 1)[:, :, None]
            keys, values = (cache[:, :, :length] for cache in now)
            seen = scaled_dot_product_attention(q, keys, values, enable_gqa=keys.shape[1] != _HEADS)
            out.append(seen[:, :, 0].unflatten(0, (_PROMPTS, _BEAMS)))
        return out

    return decode
