"""The GPU half of `nonet bench attention`: uni_attention against FlexAttention on the same packed batch and the same mask.

Kernels alone are timed in a CUDA graph, with all metadata made beforehand; "with the plan" is wall time of a training step
on a batch never seen, masks included. FlexAttention is compiled for fixed shapes and warmed; its block mask is that of the
packed documents. Rates count visible pairs only, shares are of a matrix product measured in the same run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.attention import uni_attention
from nonet.attention.dense import flex_tensors, mod_of
from nonet.attention.mask import UniMask
from nonet.errors import ConfigError

# Shapes: T packed tokens, B sequences, H heads, D width.
_HEADS, _WIDTH, _BATCHES, _ROUNDS = 8, 128, 20, 5
_REPEATS = 100  # of one backward, whose gradients must not differ by a bit


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A mask over a batch; `make` gives the mask of cuts, so that other cuts of the same total can be asked for."""

    name: str
    lengths: list[int]
    make: Callable[[Tensor], UniMask]
    options: dict[str, Any]
    queries: int = 0  # newest tokens that ask, where not all do


def attention_cuda(device: str) -> dict[str, Any]:
    """A row a mask and shape: ratios to FlexAttention, visible TFLOP/s, share of a measured matmul."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"nonet bench attention --device {device}: this machine has no CUDA device. Use --device cpu."
        )
    peak = _matmul(device)
    rows: list[dict[str, Any]] = [
        {"device": torch.cuda.get_device_name(device), "bf16 matmul 8192^3 TFLOP/s": peak}
    ]
    for case in _cases(device):
        rows.append(_measured(case, device, peak))
        print(rows[-1], flush=True)
    return {"rows": rows, "ratio": _ratios(rows)}


def _cases(device: str) -> list[_Case]:
    draw = torch.Generator().manual_seed(0)
    jagged = torch.randn(64, generator=draw).mul(0.8).exp().mul(400).clamp(16, 2048).int().tolist()
    long = [8192, 6000, 5000, 4000, 3000, 2000, 1500, 1000]

    def targets(cuts: Tensor, most: int = 256) -> Tensor:
        return (cuts.diff() // 2).clamp_max(most)

    def sessions(cuts: Tensor) -> UniMask:
        inner = torch.arange(0, int(cuts[-1]), 32, device=cuts.device)
        return UniMask.session(torch.cat([inner, cuts]).unique())

    silu = {"activation": "silu", "scaling_length": 8192.0}
    cases = [_Case("dense causal 8k", [8192] * 2, lambda cuts: UniMask.causal(), {})]
    for shape, lengths in (("jagged", jagged), ("long", long)):
        cases += [
            _Case(f"{shape} causal", lengths, lambda cuts: UniMask.causal(), {}),
            _Case(f"{shape} prefix_lm", lengths, lambda cuts: UniMask.prefix_lm(cuts.diff() // 2), {}),
            _Case(f"{shape} window 512", lengths, lambda cuts: UniMask.causal(window=512), {}),
            _Case(f"{shape} candidates", lengths, lambda cuts: UniMask.hstu(targets(cuts)), {}),
            _Case(
                f"{shape} hstu (silu; flex: softmax)",
                lengths,
                lambda cuts: UniMask.hstu(
                    targets(cuts), contextual=8, max_attn_len=512, min_full_attn_len=64
                ),
                silu,
            ),
            _Case(f"{shape} sessions", lengths, sessions, {}),
        ]
    tree = torch.randint(0, 64, (2, 64), generator=draw).to(device)
    cases.append(
        _Case(
            "beam tree decode", [4096 + 192] * 16, lambda cuts: UniMask.beam_tree(4096, tree), {}, queries=64
        )
    )
    return cases


def _measured(case: _Case, device: str, peak: float) -> dict[str, Any]:
    cuts_k = _cuts(case.lengths, device)
    cuts_q = cuts_k if not case.queries else _cuts([case.queries] * len(case.lengths), device)
    tokens_q, tokens_k = int(cuts_q[-1]), int(cuts_k[-1])
    mask = case.make(cuts_k)
    table = mask.table(cuts_q, cuts_k)
    q, k, v, grad = (
        torch.randn(n, _HEADS, _WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        for n in (tokens_q, tokens_k, tokens_k, tokens_q)
    )
    grad = grad.detach()

    def uni(of: Any = table) -> Tensor:
        return uni_attention(q, k, v, mask=of, cu_seqlens_q=cuts_q, cu_seqlens_k=cuts_k, **case.options)

    flex, asked = _flex(q, k, v), flex_tensors(table)
    block_mask = _block_mask(asked, tokens_q, tokens_k)
    row: dict[str, Any] = {"mask": case.name, "tokens": tokens_k}
    if not case.options:
        row["max difference"] = float((uni() - flex(block_mask)).detach().abs().max())
    sides = {"uni": uni, "flex": lambda: flex(block_mask)}
    train = not case.queries
    times = _graphs(sides, (q, k, v), grad, train)
    row |= {f"{side} {what} ms": ms for (side, what), ms in times.items()}
    forward = mask.flops(cuts_q, cuts_k, heads=_HEADS, width=_WIDTH)
    row["forward TFLOP/s"] = forward / times["uni", "forward"] / 1e9
    row["forward share of matmul"] = row["forward TFLOP/s"] / peak
    row["forward flex/uni"] = times["flex", "forward"] / times["uni", "forward"]
    if train:
        row["backward TFLOP/s"] = 2.5 * forward / times["uni", "backward"] / 1e9
        row["backward flex/uni"] = times["flex", "backward"] / times["uni", "backward"]
        row |= _with_plan(case, (q, k, v), grad, flex, asked)
        row["same bits"] = _same_bits(uni, (q, k, v), grad)
    row["metadata bytes a token"] = _bytes(table) / tokens_q
    return row


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Any], Tensor]:
    """Compiled FlexAttention of the packed batch, [1, H, T, D] -> [T, H, D]."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(block_mask: Any) -> Tensor:
        batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return compiled(*batched, block_mask=block_mask)[0].transpose(0, 1)  # type: ignore[index]

    return call


def _block_mask(asked: dict[str, Tensor], tokens_q: int, tokens_k: int) -> Any:
    """The block mask of these tensors; refilled for another batch they keep the compiled code."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = str(asked["start"].device)
    return create_block_mask(mod_of(asked), None, None, tokens_q, tokens_k, device=device, _compile=True)


def _graphs(
    sides: dict[str, Callable[[], Tensor]], leaves: tuple[Tensor, ...], grad: Tensor, train: bool
) -> dict[tuple[str, str], float]:
    """Milliseconds of each side, forward and backward, as medians of CUDA graphs replayed in turn."""
    steps = {}
    for side, call in sides.items():
        steps[side, "forward"] = _captured(lambda call=call: call())
        if train:
            steps[side, "both"] = _captured(lambda call=call: torch.autograd.grad(call(), leaves, grad))
    found: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(_ROUNDS):
        for key, replay in steps.items():
            found[key].append(_device_ms(replay))
    out = {key: statistics.median(values) for key, values in found.items()}
    for side in sides if train else ():
        out[side, "backward"] = out.pop((side, "both")) - out[side, "forward"]
    return out


def _captured(step: Callable[[], Any]) -> Callable[[], None]:
    """The step as a CUDA graph, warmed up on a stream of its own as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def _device_ms(step: Callable[[], Any], times: int = 20) -> float:
    """Milliseconds of one of `times` steps in a row, between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    step()
    begin.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def _with_plan(
    case: _Case,
    leaves: tuple[Tensor, ...],
    grad: Tensor,
    flex: Callable[[Any], Tensor],
    asked: dict[str, Tensor],
) -> dict[str, Any]:
    """Milliseconds of a training step on batches whose sequences come in another order each time, masks made anew."""
    draw = torch.Generator().manual_seed(1)
    device, tokens = str(grad.device), len(grad)
    seconds: dict[str, list[float]] = {"uni": [], "flex": []}
    for _ in range(_BATCHES):
        order = torch.randperm(len(case.lengths), generator=draw).tolist()
        cuts = _cuts([case.lengths[i] for i in order], device)
        mask = case.make(cuts)

        def uni(mask: UniMask = mask, cuts: Tensor = cuts) -> Tensor:
            return uni_attention(*leaves, mask=mask, cu_seqlens_q=cuts, **case.options)

        def other(mask: UniMask = mask, cuts: Tensor = cuts) -> Tensor:
            for name, x in flex_tensors(mask.table(cuts, tokens_q=tokens, tokens_k=tokens)).items():
                asked[name].copy_(x)
            return flex(_block_mask(asked, tokens, tokens))

        for side, call in (("uni", uni), ("flex", other)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            torch.autograd.grad(call(), leaves, grad)
            torch.cuda.synchronize()
            seconds[side].append(time.perf_counter() - began)
    found = {side: 1e3 * statistics.median(values[3:]) for side, values in seconds.items()}
    return {f"{side} step with plan ms": ms for side, ms in found.items()} | {
        "with plan flex/uni": found["flex"] / found["uni"]
    }


def _same_bits(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> bool:
    first = torch.autograd.grad(call(), leaves, grad)
    for _ in range(_REPEATS - 1):
        again = torch.autograd.grad(call(), leaves, grad)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return False
    return True


def _bytes(table: Any) -> int:
    """Of the table, and of its forward plan where the kernels are here."""
    tensors = [
        getattr(table, name) for name in ("start", "stop", "column_start", "column_stop", "sees", "word")
    ]
    total = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    try:
        from nonet.attention.plan import plan  # type: ignore[import-not-found]
    except ImportError:
        return total
    return total + plan(table, 128, 64).bytes()


def _matmul(device: str) -> float:
    """TFLOP/s of a bf16 product of two normal 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _device_ms(lambda: a @ b) / 1e9


def _cuts(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    out = {}
    for measure in ("forward flex/uni", "backward flex/uni", "with plan flex/uni"):
        found = [row[measure] for row in rows if measure in row]
        if found:
            out[f"{measure}, geometric mean"] = math.exp(statistics.fmean(map(math.log, found)))
            out[f"{measure}, least"] = min(found)
    return out
