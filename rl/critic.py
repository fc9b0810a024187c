"""Critic: a value head for PPO that estimates the return of a prompt and of each prefix of a beam.

The value before level l, given the codes c_0 ... c_{l-1}, is w_l . state + e_0[c_0] + ... + e_{l-1}[c_{l-1}]: a linear function
of the model's state of the prompt, plus one learned number per earlier code. No gradient flows into the model. Each trainer has
a copy of the weights, kept equal by summed gradients; checkpoints store it as `critic/`, and serving does not read it. PPO:
Schulman et al., arXiv 1707.06347; generalised advantages: arXiv 1506.02438, with a reward at the last level alone, no discount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Shapes: U users, W beams, L levels, D width.


class Critic:
    """A value head and its optimizer; all values start at 0, so the first advantages equal the rewards.

    Args:
        width: Size D of the model's states.
        codes: Number of codes of each level.
        lr: Learning rate.
        device: Device of the weights.
    """

    def __init__(self, width: int, codes: Sequence[int], lr: float, device: str | torch.device = "cpu"):
        self._head = nn.Linear(width, len(codes)).to(device)
        # The last code has no table, since no value is estimated after it.
        self._code_tables = nn.ModuleList([nn.Embedding(count, 1) for count in codes[:-1]]).to(device)
        self._parameters = [*self._head.parameters(), *self._code_tables.parameters()]
        for parameter in self._parameters:
            nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, weight_decay=0.0)

    def values(self, state_UD: Tensor, sid_UWL: Tensor) -> Tensor:
        """Compute the values [U, W, L] before each level's code is chosen.

        Args:
            state_UD: The model's states of the prompts; they receive no gradient.
            sid_UWL: Codes of the beams; -1 where a beam is invalid.
        """
        prompt_UL = self._head(state_UD.detach().float())
        values_by_level, code_sum_UW = [], torch.zeros(sid_UWL.shape[:2], device=state_UD.device)
        for level in range(sid_UWL.shape[-1]):
            values_by_level.append(prompt_UL[:, level, None] + code_sum_UW)
            if level < len(self._code_tables):
                table = self._code_tables[level]
                code_sum_UW = code_sum_UW + table(sid_UWL[..., level].long().clamp_min(0)).squeeze(-1)
        return torch.stack(values_by_level, -1)

    def step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Apply an optimizer step and clear the gradients.

        Args:
            sum_over_ranks: Sums the flat gradient over all ranks, in place or not, and returns it.
        """
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat_grad = sum_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, grad in zip(
            self._parameters, flat_grad.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = grad.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def skip(self) -> None:
        """Discard the gradients of a step that is not applied."""
        self._optimizer.zero_grad()

    def get_tensors(self) -> dict[str, Tensor]:
        """Return weights ("0", "1", ...) and optimizer state ("0.exp_avg", ...) by name, without copying."""
        tensors = {str(index): parameter.detach() for index, parameter in enumerate(self._parameters)}
        for index, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{index}.{name}"] = torch.as_tensor(value)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights and optimizer state that `get_tensors` returned."""
        for index, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[str(index)])
            state = {
                name.partition(".")[2]: value.clone()
                for name, value in tensors.items()
                if name.startswith(f"{index}.")
            }
            if state:
                self._optimizer.state[parameter] = {  # AdamW keeps its step counter on the CPU
                    name: value if name == "step" else value.to(parameter.device)
                    for name, value in state.items()
                }


def compute_generalised_advantage(
    reward_UW: Tensor, value_UWL: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages of a reward after the last level, without discount.

    Args:
        reward_UW: Reward of each beam.
        value_UWL: Value before each level.
        decay: The lambda of generalised advantage estimation: a temporal difference k levels later has the weight decay^k.

    Returns:
        Advantages and returns, [U, W, L] each.
    """
    value_UWL = value_UWL.detach()
    next_value_UWL = torch.cat([value_UWL[..., 1:], reward_UW.to(value_UWL.dtype).unsqueeze(-1)], -1)
    difference_UWL = next_value_UWL - value_UWL  # temporal differences
    advantages_last_first, advantage_UW = [], torch.zeros_like(difference_UWL[..., 0])
    for level in reversed(range(value_UWL.shape[-1])):
        advantage_UW = difference_UWL[..., level] + decay * advantage_UW
        advantages_last_first.append(advantage_UW)
    advantage_UWL = torch.stack(advantages_last_first[::-1], -1)
    return advantage_UWL, advantage_UWL + value_UWL
