"""DeepFM, which computes the logit of a click from pooled sparse rows (Guo et al., IJCAI 2017).

The row of a feature is [first-order weight, factors]. The logit is a bias plus three terms: the sum of the first-order weights,
the pairwise interactions of the factors (0.5 * (square of sum - sum of squares)), and an MLP of all factors.

With further tasks, the MLP has a head for each (`heads.py`), and the sum of the first two terms is multiplied by a learned
scale per task.
"""

# Shapes: B rows, F features, D row width, T tasks, K = D - 1 factors.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.errors import ConfigError
from nonet.models.deepfm.heads import TaskHeads, make_hidden_layers
from nonet.random import rng


class DeepFM(nn.Module):
    """The dense part of DeepFM.

    Args:
        dims: Row width by feature; the same for all features and at least 2.
        hidden: Widths of the MLP's hidden layers.
        dropout: Dropout probability of the MLP.
        seed: Seed of the initial weights.
        tasks: Names of further tasks, whose logits follow that of the target.
        experts: Number of MLPs that the tasks share.
        towers: Widths of the hidden layers of each task's own MLP.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        *,
        hidden: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        seed: int = 0,
        tasks: Sequence[str] = (),
        experts: int = 1,
        towers: Sequence[int] = (),
    ):
        super().__init__()
        widths = set(dims.values())
        if len(widths) != 1 or min(widths) < 2:
            raise ConfigError(
                f"deepfm needs one dim of at least 2 for all features, got {dict(dims)}; set sparse.defaults.dim"
            )
        self.features, n_factors = tuple(dims), len(dims) * (widths.pop() - 1)
        if tasks:
            n_tasks = 1 + len(tasks)
            self.bias, self.scale = nn.Parameter(torch.zeros(n_tasks)), nn.Parameter(torch.ones(n_tasks))
            self.mlp: nn.Sequential | TaskHeads = TaskHeads(
                n_factors, n_tasks, hidden=hidden, experts=experts, towers=towers, dropout=dropout
            )
        else:
            self.bias, sizes = nn.Parameter(torch.zeros(())), [n_factors, *hidden]
            self.mlp = nn.Sequential(*make_hidden_layers(sizes, dropout), nn.Linear(sizes[-1], 1))
        self._initialise_mlp(seed)

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B], or [B, T] with further tasks, from pooled rows [B, D] by feature."""
        rows_BFD = torch.stack([pooled[name] for name in self.features], 1)
        factors_BFK = rows_BFD[..., 1:]
        pairs_B = 0.5 * (factors_BFK.sum(1).square() - factors_BFK.square().sum(1)).sum(1)
        first_B, deep_BT = rows_BFD[..., 0].sum(1), self.mlp(factors_BFK.flatten(1))
        if isinstance(self.mlp, TaskHeads):
            return self.bias + self.scale * (first_B + pairs_B)[:, None] + deep_BT
        return self.bias + first_B + pairs_B + deep_BT[:, 0]

    def compute_loss(
        self,
        pooled: Mapping[str, Tensor],
        label: Tensor,
        weight: Tensor | None = None,
        step_rows: int | None = None,
    ) -> Tensor:
        """Compute the sum of the log losses of rows with labels [B] or [B, T], with weights of the same shape, in nats.

        The number of rows of the step on all ranks, `step_rows`, is not used: no loss depends on several rows.
        """
        return functional.binary_cross_entropy_with_logits(self(pooled), label, weight, reduction="sum")

    def hidden_matrices(self) -> list[Tensor]:
        """Return the weight matrices of the MLP's hidden layers."""
        if isinstance(self.mlp, TaskHeads):
            return self.mlp.hidden_matrices()
        *hidden, _ = (layer.weight for layer in self.mlp.children() if isinstance(layer, nn.Linear))
        return hidden

    def _initialise_mlp(self, seed: int) -> None:
        """Initialise all layers with He-normal weights and zero biases."""
        generator = rng(seed, "deepfm")
        with torch.no_grad():
            for layer in self.mlp.modules():
                if isinstance(layer, nn.Linear):
                    scale = (2.0 / layer.in_features) ** 0.5
                    layer.weight.copy_(
                        torch.from_numpy(generator.standard_normal(layer.weight.shape, "f4") * scale)
                    )
                    if layer.bias is not None:
                        layer.bias.zero_()


def build(options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int) -> DeepFM:
    """Build the dense part with initial weights (`ModelSpec.build`); a click model has no codes."""
    return DeepFM(features, seed=seed, **options)
