"""How much of the time of summing gradients a step of `ddp` waits for, with a simulated model and a simulated link.

The backward pass of a block takes a given time, in which the process sleeps. The gradients of a block are a bucket. The link sums
one bucket at a time, and takes a given time for each. A step that waits for nothing takes as long as its backward pass.
"""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from nonet.workers.engines import Ddp, OptimizerOptions
from nonet.workers.runtime import Membership

_WIDTH = 64


def bench_overlap(
    blocks: int = 12, block_ms: float = 20, bucket_ms: float = 10, rounds: int = 9
) -> dict[str, Any]:
    """Time steps whose gradients are summed during the backward pass, and after it.

    Args:
        blocks: Number of blocks.
        block_ms: Milliseconds of the backward pass of a block.
        bucket_ms: Milliseconds that the link takes for a bucket.
        rounds: Number of timed steps of each side.

    Returns:
        Median milliseconds of a step for each side and with a link that takes no time, and the share of the step in which
        it waits for the link.
    """
    sides = {"during": (True, bucket_ms), "after": (False, bucket_ms), "no link": (True, 0.0)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with mock.patch("nonet.workers.engines._gradient_buckets.BUCKET_ELEMENTS", _WIDTH * _WIDTH):
        engine = Ddp(
            {}, _Model(blocks, block_ms / 1e3), OptimizerOptions(use="adamw"), Membership(0, 2, n_trainers=2)
        )
        for _ in range(rounds):
            for side, (is_overlapped, link_ms) in sides.items():
                with mock.patch("torch.distributed.all_reduce", _Link(link_ms / 1e3).begin_sum):
                    seconds[side].append(_time_step(engine, is_overlapped))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    waited = {
        f"wait / step, sums {side} the backward pass": 1 - medians["no link"] / medians[side]
        for side in ("during", "after")
    }
    return {
        "rows": [{"sums": side, "step ms": 1e3 * value} for side, value in medians.items()],
        "ratio": waited,
    }


def _time_step(engine: Ddp, is_overlapped: bool) -> float:
    """Return the seconds of a step from the beginning of its backward pass to its update."""
    loss = engine.model(torch.ones(1, _WIDTH)).square().mean()
    start = time.perf_counter()
    (engine.backward_last if is_overlapped else engine.backward)(loss)
    engine.clip()
    engine.step(1e-3)
    return time.perf_counter() - start


class _Link:
    """A link that sums one bucket after another."""

    def __init__(self, bucket_s: float):
        self._bucket_s, self._free_at = bucket_s, 0.0

    def begin_sum(self, values: Tensor, group: Any, async_op: bool) -> _Sum:
        """Begin the sum of a bucket."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._bucket_s
        return _Sum(self._free_at)


class _Sum:
    """A sum that is complete at a time."""

    def __init__(self, complete_at: float):
        self._complete_at = complete_at

    def wait(self) -> None:
        """Wait for the sum."""
        time.sleep(max(0.0, self._complete_at - time.perf_counter()))


class _Model(nn.Sequential):
    """Blocks whose backward passes take a given time."""

    def __init__(self, blocks: int, block_s: float):
        super().__init__(*(_Block(block_s) for _ in range(blocks)))


class _Block(nn.Linear):
    """A linear layer whose backward pass takes a given time."""

    def __init__(self, block_s: float):
        super().__init__(_WIDTH, _WIDTH, bias=False)
        self._block_s = block_s

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer."""
        output: Any = _Sleep.apply(super().forward(input), self._block_s)
        return output


class _Sleep(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seconds: float) -> Tensor:
        """Return the input."""
        ctx.seconds = seconds
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sleep, and return the gradient."""
        time.sleep(ctx.seconds)
        return grads[0], None
