"""Critic: a value head for PPO that estimates the return of a prompt and of each prefix of a beam.

V_l = w_l . state + e_1[c_1] + ... + e_l[c_l] on the model's states; no gradient flows into the model. Each trainer has a copy
of the weights, kept equal by summed gradients; checkpoints store it as `critic/`, and serving does not read it. PPO: Schulman
et al., arXiv 1707.06347; generalised advantages: arXiv 1506.02438, with a reward at the last level alone and no discount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Shapes: U users, W beams, L levels, K codes, D width.


class Critic:
    """A value head and its optimizer; all values start at 0, so the first advantages equal the rewards."""

    def __init__(self, width: int, codes: Sequence[int], lr: float, device: str | torch.device = "cpu"):
        self._head = nn.Linear(width, len(codes)).to(device)
        self._codes = nn.ModuleList([nn.Embedding(k, 1) for k in codes[:-1]]).to(device)
        self._parameters = [*self._head.parameters(), *self._codes.parameters()]
        for parameter in self._parameters:
            nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, weight_decay=0.0)

    def values(self, state_UD: Tensor, sid_UWL: Tensor) -> Tensor:
        """Compute the values [U, W, L] before each level's code is chosen, with a gradient to the head alone."""
        prompt_UL = self._head(state_UD.detach().float())
        parts, known_UW = [], torch.zeros(sid_UWL.shape[:2], device=state_UD.device)
        for level in range(sid_UWL.shape[-1]):
            parts.append(prompt_UL[:, level, None] + known_UW)
            if level < len(self._codes):
                codes = self._codes[level]
                known_UW = known_UW + codes(sid_UWL[..., level].long().clamp_min(0)).squeeze(-1)
        return torch.stack(parts, -1)

    def step(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Apply an optimizer step.

        Args:
            summed: Sums the flat gradient over all ranks, in place or not, and returns it.
        """
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = summed(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, piece in zip(
            self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = piece.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def skip(self) -> None:
        """Discard the gradients of a step that is not applied."""
        self._optimizer.zero_grad()

    def get_tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, without copying."""
        tensors = {str(place): parameter.detach() for place, parameter in enumerate(self._parameters)}
        for place, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{place}.{name}"] = torch.as_tensor(value)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights and optimizer state that `get_tensors` returned."""
        for place, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[str(place)])
            state = {
                name.partition(".")[2]: value.clone()
                for name, value in tensors.items()
                if name.startswith(f"{place}.")
            }
            if state:
                self._optimizer.state[parameter] = {
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
        decay: Lambda: the weight of a temporal difference k levels later is decay^k.

    Returns:
        Advantages and returns, [U, W, L] each.
    """
    value_UWL = value_UWL.detach()
    after_UWL = torch.cat([value_UWL[..., 1:], reward_UW.to(value_UWL.dtype).unsqueeze(-1)], -1)
    surprise_UWL = after_UWL - value_UWL
    out, later = [], torch.zeros_like(surprise_UWL[..., 0])
    for level in reversed(range(value_UWL.shape[-1])):
        later = surprise_UWL[..., level] + decay * later
        out.append(later)
    advantage_UWL = torch.stack(out[::-1], -1)
    return advantage_UWL, advantage_UWL + value_UWL
