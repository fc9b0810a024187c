"""The deep part of a click model with several tasks: experts that all tasks share, and a tower for each task.

With one expert, it is a shared bottom (Caruana, Machine Learning 28, 1997). With several, the gate of each task mixes their
outputs (multi-gate mixture of experts, MMoE; Ma et al., KDD 2018).
"""

# Shapes: B rows, N inputs, E experts, H outputs of an expert, K tasks.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class TaskHeads(nn.Module):
    """Computes a logit per task from the inputs of a row.

    Args:
        n_inputs: Number of inputs N.
        n_tasks: Number of tasks K.
        hidden: Widths of the hidden layers of each expert.
        experts: Number of experts E.
        towers: Widths of the hidden layers of each task's tower; none for a linear one.
        dropout: Dropout probability after each hidden layer.
    """

    def __init__(
        self,
        n_inputs: int,
        n_tasks: int,
        *,
        hidden: Sequence[int],
        experts: int,
        towers: Sequence[int],
        dropout: float,
    ):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(*make_hidden_layers([n_inputs, *hidden], dropout)) for _ in range(experts)
        )
        n_gates = n_tasks if experts > 1 else 0
        self.gates = nn.ModuleList(nn.Linear(n_inputs, experts, bias=False) for _ in range(n_gates))
        widths = [hidden[-1], *towers]
        self.towers = nn.ModuleList(
            nn.Sequential(*make_hidden_layers(widths, dropout), nn.Linear(widths[-1], 1))
            for _ in range(n_tasks)
        )

    def forward(self, inputs_BN: Tensor) -> Tensor:
        """Compute the logits [B, K]."""
        expert_BEH = torch.stack([expert(inputs_BN) for expert in self.experts], 1)
        if self.gates:
            weight_BKE = torch.stack([gate(inputs_BN) for gate in self.gates], 1).softmax(-1)
            mixed_BKH = weight_BKE @ expert_BEH
        else:
            mixed_BKH = expert_BEH.expand(-1, len(self.towers), -1)
        return torch.cat([tower(mixed_BKH[:, task]) for task, tower in enumerate(self.towers)], 1)

    def hidden_matrices(self) -> list[Tensor]:
        """Return the weight matrices of the hidden layers of experts and towers."""
        hidden = [layer for expert in self.experts for layer in expert.modules()]
        hidden += [layer for tower in self.towers for layer in list(tower.modules())[:-1]]
        return [layer.weight for layer in hidden if isinstance(layer, nn.Linear)]


def make_hidden_layers(widths: Sequence[int], dropout: float) -> list[nn.Module]:
    """Make linear layers between successive widths, each with ReLU and dropout."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(dropout)]
    return layers
