"""`nonet bench attention`: uni_attention compared with torch's attention for the same masks, on this machine's CPU or GPU.

On a CPU, the sides process 4 jagged sequences: uni_attention, SDPA with a dense bool mask, and compiled FlexAttention, which
has only a forward pass there. The sides take turns, and medians are reported. On a GPU, the rows are those of
`nonet.bench.attention.gpu`. The times of SDPA and FlexAttention do not include making their masks; those of uni_attention do.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

from nonet.bench.timing import measure_milliseconds, summarise_ratios

_LENGTHS = (1024, 700, 400, 150)
_HEADS, _WIDTH = 4, 64
_ROUNDS = 9
_TOKENS = 65536


def bench_attention(device: str = "cpu") -> dict[str, Any]:
    """Return milliseconds by mask, dtype and side; ratios above 1 mean that uni_attention is faster."""
    import torch

    if device != "cpu":
        from nonet.bench.attention.gpu import bench_gpu

        return bench_gpu(widths=(64, 128), with_checks=False, budget_s=float("inf"))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_compare_mask(name, dtype) for dtype in ("float32", "bfloat16") for name in _list_masks()]
    finally:
        torch.set_num_threads(threads)
    rows += [_measure_planning(name) for name in ("causal", "hstu")] + [_measure_memory()]
    return {"rows": rows, "ratio": _summarise_ratios(rows)}


def _list_masks() -> dict[str, Any]:
    """Return by name the mask for the packed batch, and the FlexAttention mask_mod for the padded batch (None if left out)."""
    import torch

    from nonet.attention.masks import UniMask

    targets, lengths = torch.tensor([200, 100, 64, 20]), torch.tensor(_LENGTHS)
    history = lengths - targets

    def is_inside(b: Any, q: Any, k: Any) -> Any:
        return (q < lengths[b]) & (k < lengths[b])

    def is_candidate_visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return is_inside(b, q, k) & ((q == k) | ((k < history[b]) & ((q >= history[b]) | (k <= q))))

    return {
        "causal": (UniMask.causal(), lambda b, h, q, k: is_inside(b, q, k) & (k <= q)),
        "prefix_lm": (
            UniMask.prefix_lm(history),
            lambda b, h, q, k: is_inside(b, q, k) & ((k < history[b]) | (k <= q)),
        ),
        "candidates": (UniMask.hstu(targets), is_candidate_visible),
        "window 256": (
            UniMask.causal(window=256),
            lambda b, h, q, k: is_inside(b, q, k) & (k <= q) & (k > q - 256),
        ),
        "hstu": (UniMask.hstu(targets, contextual=8, max_attn_len=256, min_full_attn_len=64), None),
    }


def _compare_mask(name: str, dtype: str) -> dict[str, Any]:
    """Compare the sides for one mask and dtype: training steps with SDPA, forward passes with SDPA and FlexAttention."""
    import torch

    mask, mask_mod = _list_masks()[name]
    sides = _make_sides(mask, mask_mod, getattr(torch, dtype))
    train = measure_milliseconds(
        {side: steps["train"] for side, steps in sides.items() if "train" in steps}, _ROUNDS
    )
    forward = measure_milliseconds({side: steps["forward"] for side, steps in sides.items()}, _ROUNDS)
    row: dict[str, Any] = {"mask": name, "type": dtype}
    row |= {f"train {side} ms": train[side] for side in sides if side in train}
    row |= {f"forward {side} ms": forward[side] for side in sides}
    row["train sdpa/uni"] = train["sdpa"] / train["uni"]
    row["train sdpa/uni, CPU time"] = train["sdpa CPU"] / train["uni CPU"]
    row |= {f"forward {side}/uni": forward[side] / forward["uni"] for side in sides if side != "uni"}
    return row


def _make_sides(mask: Any, mask_mod: Any, dtype: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the steps of each side for one mask and dtype, after one call of each."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from nonet.attention import uni_attention

    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *_LENGTHS]).cumsum(0)
    longest, tokens = max(_LENGTHS), sum(_LENGTHS)
    packed = [torch.randn(tokens, _HEADS, _WIDTH, generator=generator, dtype=dtype) for _ in range(4)]
    padded = [torch.zeros(len(_LENGTHS), longest, _HEADS, _WIDTH, dtype=dtype) for _ in packed]
    dense = torch.zeros(len(_LENGTHS), 1, longest, longest, dtype=torch.bool)
    packed_mask = mask.to_dense(cu_seqlens)
    for b, n in enumerate(_LENGTHS):
        rows = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        dense[b, 0, :n, :n] = packed_mask[rows, rows]
        for padded_tensor, x in zip(padded, packed, strict=True):
            padded_tensor[b, :n] = x[rows]
    dense[:, :, :, 0] |= ~dense.any(-1)  # the softmax of a padded row without visible keys would be NaN
    padded = [x.transpose(1, 2).contiguous() for x in padded]

    def run_uni(q: Any, k: Any, v: Any) -> Any:
        return uni_attention(q, k, v, mask=mask, cu_seqlens_q=cu_seqlens)

    def run_sdpa(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, attn_mask=dense)

    sides = {"uni": _make_steps(run_uni, packed), "sdpa": _make_steps(run_sdpa, padded)}
    if mask_mod is not None and dtype == torch.float32:
        sides["flex"] = {"forward": _make_flex_step(mask_mod, padded)}
    for side in sides.values():  # first calls are slower: they compile, or fill caches
        for step in side.values():
            step()
    return sides


def _make_steps(call: Callable[..., Any], tensors: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return the forward and training steps of an attention function."""
    import torch

    q, k, v, grad = tensors

    def forward() -> None:
        with torch.no_grad():
            call(q, k, v)

    def train() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        call(*leaves).backward(grad)

    return {"forward": forward, "train": train}


def _make_flex_step(mask_mod: Any, padded: list[Any]) -> Callable[[], Any]:
    """Return the forward step of compiled FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    longest = padded[0].shape[2]
    block_mask = create_block_mask(mask_mod, len(_LENGTHS), None, longest, longest, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(flex_attention, dynamic=False)

        def step() -> None:
            with torch.no_grad():
                compiled(*padded[:3], block_mask=block_mask)

        step()
    return step


def _measure_planning(name: str) -> dict[str, Any]:
    """Measure the milliseconds in which a mask of 65,536 tokens becomes an interval table, and the table a plan."""
    import torch

    from nonet.attention.masks import UniMask
    from nonet.attention.torch_backends import split_mask

    cu_seqlens = torch.arange(0, _TOKENS + 1, 1024)
    targets = torch.full((len(cu_seqlens) - 1,), 100)
    mask = {"causal": UniMask.causal(), "hstu": UniMask.hstu(targets, max_attn_len=256)}[name]
    table = mask.build_table(cu_seqlens)
    steps: dict[str, Callable[[], Any]] = {
        "table": lambda: mask.build_table(cu_seqlens),
        "pieces": lambda: split_mask(table, list(range(len(cu_seqlens) - 1))),
    }
    try:
        from nonet.attention.plans import make_plan  # type: ignore[import-not-found]

        steps["tile plan"] = lambda: make_plan(table, 64, 64)
    except ImportError:
        pass
    return {"plan": name, "tokens": _TOKENS} | {
        f"{step} ms": ms for step, ms in measure_milliseconds(steps, _ROUNDS).items()
    }


_MEMORY = """
import torch
torch.set_num_threads(1)
from nonet.attention.attention import uni_attention
from nonet.attention.masks.mask import UniMask
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
q, k, v = (torch.randn(65536, 1, 16, requires_grad=True) for _ in range(3))
small, cut = torch.tensor([0, 600]), torch.tensor([0, 65536])
uni_attention(q[:600], k[:600], v[:600], mask=UniMask.causal(window=9), cu_seqlens_q=small).sum().backward()
open("/proc/self/clear_refs", "w").write("5")  # resets the peak (VmHWM)
before = status("VmRSS")
uni_attention(q, k, v, mask=UniMask.causal(window=512), cu_seqlens_q=cut).sum().backward()
print(status("VmHWM") - before)
"""


def _measure_memory() -> dict[str, Any]:
    """Measure by how much a training step on one sequence of 65,536 tokens raises the memory peak of a new process."""
    process = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    return {
        "memory": "window 512, one sequence, forward and backward",
        "tokens": _TOKENS,
        "added MB": int(process.stdout) / 1024,
        "a dense bool mask MB": _TOKENS**2 / 1e6,
    }


def _summarise_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Summarise the ratios of all masks, by dtype and measure."""
    summary = {}
    for dtype in ("float32", "bfloat16"):
        for measure in ("train sdpa/uni", "train sdpa/uni, CPU time", "forward sdpa/uni", "forward flex/uni"):
            values = [row[measure] for row in rows if row.get("type") == dtype and measure in row]
            summary |= summarise_ratios(f"{dtype} {measure}", values)
    return summary
