"""Frozen weights of a divided model: parameters without gradients, which checkpoints leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def make_frozen_parameters(model: nn.Module) -> list[str]:
    """Turn the frozen weights of a model, which are buffers, into parameters without gradients. Returns their names.

    fully_shard divides parameters alone. Single numbers stay buffers.
    """
    names = []
    for path, module in model.named_modules():
        for own_name in getattr(module, "frozen_weights", ()):
            buffer = module._buffers.get(own_name)
            if buffer is not None and buffer.ndim:
                delattr(module, own_name)
                module.register_parameter(own_name, nn.Parameter(buffer, requires_grad=False))
            if own_name in module._parameters:
                names.append(f"{path}.{own_name}")
    return names


def leave_out_of_state(model: nn.Module, names: Sequence[str]) -> None:
    """Leave weights out of the state dict of a model, and do not miss them when one is loaded."""

    def remove(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in names:
            state.pop(f"{prefix}{name}", None)

    def ignore(_: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in names]

    if names:
        model.register_state_dict_post_hook(remove)
        model.register_load_state_dict_post_hook(ignore)
