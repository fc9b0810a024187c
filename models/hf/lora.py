"""LoRA (Hu et al. 2021): the backbone is frozen, and every chosen linear layer learns a low-rank difference.

    y = W x + (alpha / rank) B A x,   A initialised with small values, B with zeros: training starts from the backbone

W becomes a buffer that no checkpoint contains, so only the differences and the rows of semantic ids are trained, stored and
published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nonet.errors import ConfigError
from nonet.suggest import join_names, suggest_sentence


class LoraLinear(nn.Module):
    """A linear layer (torch's, or GPT-2's, which stores its weight transposed) with a low-rank difference."""

    def __init__(self, base: nn.Module, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self._is_transposed = not isinstance(base, nn.Linear)
        n_out, n_in = tuple(base.weight.shape)[:: -1 if self._is_transposed else 1]  # type: ignore[union-attr]
        self.a, self.b = nn.Parameter(torch.empty(rank, n_in)), nn.Parameter(torch.zeros(n_out, rank))
        nn.init.normal_(self.a, std=n_in**-0.5)

    @property
    def trained_products(self) -> int:
        """Number of multiplications by trained weights per input row."""
        return self.a.numel() + self.b.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base layer plus the low-rank update."""
        low_rank = nn.functional.linear(x.to(self.a.dtype), self.a)
        return self.base(x) + (self.scale * nn.functional.linear(low_rank, self.b)).to(x.dtype)

    @torch.no_grad()
    def merge_weights(self) -> nn.Module:
        """Add the difference to the weight of the base layer, in place, and return that layer."""
        difference = self.scale * self.b @ self.a
        weight: Any = self.base.weight
        weight += (difference.T if self._is_transposed else difference).to(weight.dtype)
        return self.base


def add(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Replace, in place, the linear layers that `targets` names by layers with a low-rank difference.

    A target is the last part of a layer's path, such as q_proj; by default all linear layers are replaced.

    Raises:
        ConfigError: The backbone has no layer of that name.
    """
    paths = list_linear_layers(model)
    targets = select_targets(options.get("targets"), paths)
    for path in paths:
        if path.rsplit(".", 1)[-1] in targets:
            parent, _, name = path.rpartition(".")
            parent_module = model.get_submodule(parent)
            setattr(
                parent_module,
                name,
                LoraLinear(getattr(parent_module, name), int(options["rank"]), float(options["alpha"])),
            )


def merge(model: nn.Module) -> None:
    """Replace, in place, every layer with a difference by its base layer with the difference added."""
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.merge_weights())


def list_linear_layers(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers, including those of GPT-2 (Conv1D)."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


def select_targets(targets: Sequence[str] | None, paths: Sequence[str]) -> set[str]:
    """Return the last parts of the paths of the layers that get a difference; all by default.

    Raises:
        ConfigError: The backbone has no layer of that name.
    """
    names = dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths)
    for target in targets or ():
        if target not in names:
            raise ConfigError(
                f"model.lora.targets: the backbone has no layer {target!r}; it has {join_names(names)}."
                f"{suggest_sentence(target, names)}"
            )
    return set(targets or names)
