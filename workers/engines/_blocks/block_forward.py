"""Recomputation and compilation of a model's blocks while they are trained; without gradients they run unchanged.

The `forward` of a block is replaced and not the block itself, so that the names of weights in checkpoints stay the same.
Source of recomputation: Chen et al. 2016, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nonet.errors import ConfigError


class BlockForward:
    """The forward function of a block, recomputed, compiled or both while gradients are enabled."""

    def __init__(self, block: torch.nn.Module, *, recompute: bool, compiled: bool):
        self.block, self.recompute, self.compiled = block, recompute, compiled

    def __call__(self, *args: Any, **named: Any) -> Any:
        forward = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, *args, **named)
        if self.compiled:
            forward = _compile_forward(forward)
        if self.recompute:
            return checkpoint(forward, self.block, *args, use_reentrant=False, **named)
        return forward(self.block, *args, **named)


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the `blocks` of a model; if it has none, the largest list of layers, as in Hugging Face's models."""
    if (blocks := getattr(model, "blocks", None)) is not None:
        return list(blocks)
    not_blocks = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.ModuleList)
    layer_lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and not any(isinstance(layer, not_blocks) for layer in module)
    ]

    def count_parameters(layers: list[torch.nn.Module]) -> int:
        return sum(p.numel() for layer in layers for p in layer.parameters())

    return max(layer_lists, key=count_parameters, default=[])


def prepare(model: torch.nn.Module, options: dict[str, Any]) -> None:
    """Remove `recompute` and `compile` from an engine's options and apply them to the model's blocks.

    Raises:
        ConfigError: The model has no blocks.
    """
    flags: Mapping[str, bool] = {key: options.pop(key, False) for key in ("recompute", "compile")}
    if not any(flags.values()):
        return
    blocks: list[Any] = find_blocks(model)
    if not blocks:
        key = next(key for key, is_set in flags.items() if is_set)
        raise ConfigError(
            f"roles.trainer.engine.{key}: {type(model).__name__} has no blocks, which are its attribute `blocks` or its largest "
            "torch.nn.ModuleList of layers; leave it out"
        )
    for block in blocks:
        block.forward = BlockForward(block, recompute=flags["recompute"], compiled=flags["compile"])


_COMPILED: dict[Any, Any] = {}  # Compiled function by the forward function of a class.


def _compile_forward(forward: Any) -> Any:
    """Return the compiled forward function, shared by all blocks of a class."""
    if forward not in _COMPILED:
        # The compiler has a switch of its own, which `set_deterministic_debug_mode` leaves alone.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        _COMPILED[forward] = torch.compile(forward, dynamic=True)
    return _COMPILED[forward]
