"""StepMeter: counts the floating-point operations of a trainer's losses and times the sections of its steps.

Matrix products are counted while gradients are enabled. A weight takes two operations per row in the forward pass and
four in the backward pass (two if it is frozen, since only the gradient of its input is computed). Attention is counted
over the pairs of positions that the mask allows. Rows are real positions: a model that packs or pads its input reports
their number as `pass_size`, so padding is not counted. Recomputation, look-ups, normalisation and the optimizer are not
counted either, so the utilisation is that of the model alone. The peak rate is that of a matrix product measured on the
same device in the same precision. Times are measured on the host. Source: Chowdhery et al. 2022, arXiv 2204.02311,
appendix B.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from nonet.workers.devices import get_device
from nonet.workers.engines._blocks import find_blocks

# Operations per trained or frozen weight and row: 2 in the forward pass, and 4 or 2 in the backward pass.
_TRAINED, _FROZEN = 6.0, 4.0
# Operations of attention per allowed pair and column: scores and weighted sums, forward and backward.
_PAIR = 12.0
# Sizes of the measured product. The first that takes `_LEAST_MATMUL_S` is used: a shorter product measures its launch.
_MATMUL_SIZES, _LEAST_MATMUL_S = (512, 1024, 2048, 4096, 8192), 0.01
_TIMED_RUNS = 4  # Number of timed products besides the first, which may include set-up time.

# The measured fields of a step's record. Their values differ between two identical runs.
MEASURED = (
    "seconds",
    "waited",
    "sparse",
    "dense",
    "communication",
    "optimizer",
    "flops",
    "positions",
    "peak",
)


class StepMeter:
    """Counts the operations of a model from `watch` on; `take_counts` returns the counts since the last call and resets them."""

    def __init__(self) -> None:
        self.flops, self.positions = 0.0, 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._cached_pairs: tuple[Any, float] = (
            None,
            0.0,
        )  # The last offsets, and the pairs counted for them.
        self._model: Any = None
        self._tensor_ranks = 1

    def watch(self, model: nn.Module, tensor_ranks: int = 1) -> None:
        """Count the operations of a model while gradients are enabled.

        Each block has one hook instead of one per layer, so blocks may be compiled.

        Args:
            model: The model.
            tensor_ranks: Number of ranks that divide the operations of each block.
        """
        self._model, self._tensor_ranks = model, tensor_ranks
        blocks = find_blocks(model)
        ids_in_blocks = {id(module) for block in blocks for module in block.modules()}
        for number, block in enumerate(blocks):
            operations_per_row = sum(map(_count_operations, block.modules()))
            block.register_forward_hook(partial(self._count_block, operations_per_row, number == 0))
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module) not in ids_in_blocks:
                module.register_forward_hook(self._count_linear)

    def __deepcopy__(self, memo: Any) -> StepMeter:
        """Return the meter itself: copies of a model are frozen and count nothing, so they need no meter of their own."""
        return self

    @contextmanager
    def time_section(self, name: str) -> Iterator[None]:
        """Add the time within the context to a section."""
        started_at = time.perf_counter()
        yield
        self.add_seconds(name, time.perf_counter() - started_at)

    def add_seconds(self, section: str, seconds: float) -> None:
        """Add seconds to a section."""
        self._seconds[section] += seconds

    def take_counts(self) -> dict[str, float]:
        """Return "flops", "positions" and the seconds of each section since the last call, and reset them."""
        counts = {"flops": self.flops, "positions": self.positions, **self._seconds}
        self.flops, self.positions, self._seconds = 0.0, 0.0, defaultdict(float)
        return counts

    def _count_linear(self, module: nn.Linear, args: Any, output: Tensor) -> None:
        """Count the operations of a linear layer outside the blocks."""
        if torch.is_grad_enabled():
            self.flops += _count_operations(module) * output.numel() / module.out_features

    def _count_block(
        self,
        operations_per_row: float,
        is_first: bool,
        block: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        """Count the operations of a block and, for the first block, its positions."""
        if not torch.is_grad_enabled():
            return
        states = output[0] if isinstance(output, tuple) else output  # Of the same shape as the block's input.
        pass_size = getattr(self._model, "pass_size", None)
        rows, pairs = pass_size or (states.numel() // states.shape[-1], self._count_pairs(states, args))
        operations = operations_per_row * rows + _PAIR * pairs * states.shape[-1]
        self.flops += operations / self._tensor_ranks
        self.positions += rows if is_first else 0.0

    def _count_pairs(self, states: Tensor, args: tuple[Any, ...]) -> float:
        """Count the pairs that a causal mask allows, for packed states [T, D] with offsets [B + 1] or padded states [B, T, D]."""
        if states.ndim == 3:
            return states.shape[0] * states.shape[1] * (states.shape[1] + 1) / 2
        offsets = args[1] if len(args) > 1 else None
        if offsets is not self._cached_pairs[0]:  # All blocks of a pass get the same offsets.
            lengths = offsets.diff().double() if isinstance(offsets, Tensor) else torch.zeros(1)
            self._cached_pairs = offsets, float((lengths * (lengths + 1) / 2).sum())
        return self._cached_pairs[1]


def _count_operations(module: nn.Module) -> float:
    """Return the operations of a module for one row, forward and backward, without those of its submodules.

    `trained_products` is the number of trained weights that a module multiplies without a linear layer.
    """
    operations = _TRAINED * float(getattr(module, "trained_products", 0))
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":  # Conv1D: GPT-2's linear layer.
        weight, layer = module.weight, cast(Any, module)
        # A divided weight may have no elements here.
        size = (
            layer.in_features * layer.out_features if isinstance(module, nn.Linear) else layer.nx * layer.nf
        )
        is_trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        operations += (_TRAINED if is_trained else _FROZEN) * size
    return operations


@cache
def measure_matmul_rate(device_name: str, precision: str = "fp32") -> float:
    """Measure the operations per second of a square matrix product, the best of a few runs.

    Args:
        device_name: Name of the device, `kind` or `kind:number`.
        precision: Precision of the product.
    """
    for size in _MATMUL_SIZES:
        best_s = _time_matmul(size, device_name, precision)
        if best_s >= _LEAST_MATMUL_S:
            break
    return 2.0 * size**3 / best_s


def _time_matmul(size: int, device_name: str, precision: str) -> float:
    """Return the seconds of the fastest product of two matrices [size, size] of normal numbers.

    Numbers are not constant, because GPUs multiply constants faster. They come from a generator of their own, so that
    those of the run stay the same, and are repeated, because drawing all of them takes a second.
    """
    device = get_device(device_name)
    tile, generator = _MATMUL_SIZES[0], torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(tile, tile, generator=generator).to(device_name).repeat(size // tile, size // tile)
        for _ in range(2)
    )
    best_s = float("inf")
    with torch.no_grad(), device.autocast(precision):
        for _ in range(_TIMED_RUNS + 1):
            device.synchronize()
            started_at = time.perf_counter()
            torch.mm(left, right)
            device.synchronize()
            best_s = min(best_s, time.perf_counter() - started_at)
    return best_s
