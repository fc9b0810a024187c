"""DeepFM, which computes the logit of a click from pooled sparse rows (Guo et al., IJCAI 2017).

The row of a feature is [first-order weight, factors]. The logit is a bias plus three terms: the sum of the first-order weights,
the pairwise interactions of the factors (0.5 * (square of sum - sum of squares)), and an MLP of all factors.
"""

# Shapes: B rows, F features, D row width, K = D - 1 factors.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.errors import ConfigError
from nonet.random import rng


class DeepFM(nn.Module):
    """The dense part of DeepFM.

    Args:
        dims: Row width by feature; the same for all features and at least 2.
        hidden: Widths of the MLP's hidden layers.
        dropout: Dropout probability of the MLP.
        seed: Seed of the initial weights.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        *,
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        widths = set(dims.values())
        if len(widths) != 1 or min(widths) < 2:
            raise ConfigError(
                f"deepfm needs one dim of at least 2 for all features, got {dict(dims)}; set sparse.defaults.dim"
            )
        self.features, self.bias = tuple(dims), nn.Parameter(torch.zeros(()))
        sizes = [len(dims) * (widths.pop() - 1), *hidden]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self._initialise_mlp(seed)

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B] from pooled rows [B, D] by feature."""
        rows_BFD = torch.stack([pooled[name] for name in self.features], 1)
        factors_BFK = rows_BFD[..., 1:]
        pairs_B = 0.5 * (factors_BFK.sum(1).square() - factors_BFK.square().sum(1)).sum(1)
        return self.bias + rows_BFD[..., 0].sum(1) + pairs_B + self.mlp(factors_BFK.flatten(1))[:, 0]

    def compute_loss(self, pooled: Mapping[str, Tensor], label: Tensor) -> Tensor:
        """Compute the sum of the log losses of rows with labels [B], in nats."""
        return functional.binary_cross_entropy_with_logits(self(pooled), label, reduction="sum")

    def hidden_matrices(self) -> list[Tensor]:
        """Return the weight matrices of the MLP's hidden layers."""
        *hidden, _ = (layer.weight for layer in self.mlp if isinstance(layer, nn.Linear))
        return hidden

    def _initialise_mlp(self, seed: int) -> None:
        """Initialise the MLP with He-normal weights and zero biases."""
        generator = rng(seed, "deepfm")
        with torch.no_grad():
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    scale = (2.0 / layer.in_features) ** 0.5
                    layer.weight.copy_(
                        torch.from_numpy(generator.standard_normal(layer.weight.shape, "f4") * scale)
                    )
                    layer.bias.zero_()


def build(options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int) -> DeepFM:
    """Build the dense part with initial weights (`ModelSpec.build`); a click model has no codes."""
    return DeepFM(features, seed=seed, **options)
