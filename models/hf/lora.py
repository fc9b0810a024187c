"""LoRA (Hu et al. 2021): the backbone is frozen, and every chosen linear layer learns a low-rank difference.

    y = W x + (alpha / rank) B A x,   A drawn small, B zero: training starts from the backbone

W becomes a buffer that no checkpoint stores, so only the differences and the rows of semantic ids are trained, stored and
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
        self._turned = not isinstance(base, nn.Linear)
        out, into = tuple(base.weight.shape)[:: -1 if self._turned else 1]  # type: ignore[union-attr]
        self.a, self.b = nn.Parameter(torch.empty(rank, into)), nn.Parameter(torch.zeros(out, rank))
        nn.init.normal_(self.a, std=into**-0.5)

    @property
    def trained_products(self) -> int:
        """Number of trained weights per input row."""
        return self.a.numel() + self.b.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base layer plus the low-rank update."""
        low = nn.functional.linear(x.to(self.a.dtype), self.a)
        return self.base(x) + (self.scale * nn.functional.linear(low, self.b)).to(x.dtype)

    @torch.no_grad()
    def merge_weights(self) -> nn.Module:
        """Return the layer with the difference added to its weight."""
        difference = self.scale * self.b @ self.a
        weight: Any = self.base.weight
        weight += (difference.T if self._turned else difference).to(weight.dtype)
        return self.base


def add(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Add differences to the linear layers that `targets` names by the last part of their names.

    Raises:
        ConfigError: The backbone has no layer of that name.
    """
    places = list_linear_layers(model)
    targets = select_targets(options.get("targets"), places)
    for path in places:
        if path.rsplit(".", 1)[-1] in targets:
            parent, _, name = path.rpartition(".")
            home = model.get_submodule(parent)
            setattr(
                home, name, LoraLinear(getattr(home, name), int(options["rank"]), float(options["alpha"]))
            )


def merge(model: nn.Module) -> None:
    """Replace every layer with a difference by the merged one."""
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.merge_weights())


def list_linear_layers(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


def select_targets(targets: Sequence[str] | None, places: Sequence[str]) -> set[str]:
    """Return the names of the layers that get a difference; all by default.

    Raises:
        ConfigError: The backbone has no layer of that name.
    """
    names = dict.fromkeys(path.rsplit(".", 1)[-1] for path in places)
    for target in targets or ():
        if target not in names:
            raise ConfigError(
                f"model.lora.targets: the backbone has no layer {target!r}; it has {join_names(names)}."
                f"{suggest_sentence(target, names)}"
            )
    return set(targets or names)
