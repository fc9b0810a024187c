"""Critic: what a prompt and the first codes of a beam are worth, for PPO; a head of its own beside the model.

V_l = w_l . state + e_1[c_1] + ... + e_l[c_l] on the model's states, which it reads and never moves. Its weights are each
trainer's, kept equal by summed gradients, and go into commits as `critic/`; nothing that serves reads them. PPO: Schulman
et al., arXiv 1707.06347; generalised advantages: arXiv 1506.02438, with a reward at the last level alone and no discount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Shapes: U users, W beams, L levels, K codes, D width.


class Critic:
    """A value head and its optimizer. It starts at 0 everywhere, so the first advantages are the rewards themselves."""

    def __init__(self, width: int, codes: Sequence[int], lr: float, device: str | torch.device = "cpu"):
        self._head = nn.Linear(width, len(codes)).to(device)
        self._codes = nn.ModuleList([nn.Embedding(k, 1) for k in codes[:-1]]).to(device)
        self._parameters = [*self._head.parameters(), *self._codes.parameters()]
        for parameter in self._parameters:
            nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, weight_decay=0.0)

    def values(self, state_UD: Tensor, sid_UWL: Tensor) -> Tensor:
        """Values [U, W, L] before each level's code is chosen, with a gradient to the head alone."""
        prompt_UL = self._head(state_UD.detach().float())
        parts, known_UW = [], torch.zeros(sid_UWL.shape[:2], device=state_UD.device)
        for level in range(sid_UWL.shape[-1]):
            parts.append(prompt_UL[:, level, None] + known_UW)
            if level < len(self._codes):
                codes = self._codes[level]
                known_UW = known_UW + codes(sid_UWL[..., level].long().clamp_min(0)).squeeze(-1)
        return torch.stack(parts, -1)

    def step(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Move by the gradients, which `summed` adds up over all ranks (flat, in place or not)."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = summed(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, piece in zip(
            self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = piece.view_as(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def skip(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name, as they are now."""
        found = {str(place): parameter.detach() for place, parameter in enumerate(self._parameters)}
        for place, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                found[f"{place}.{name}"] = torch.as_tensor(value)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What `tensors` gave."""
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


def generalised_advantage(reward_UW: Tensor, value_UWL: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [U, W, L] of a reward after the last level: sums of decay^k times each rise in value."""
    value_UWL = value_UWL.detach()
    after_UWL = torch.cat([value_UWL[..., 1:], reward_UW.to(value_UWL.dtype).unsqueeze(-1)], -1)
    surprise_UWL = after_UWL - value_UWL
    out, later = [], torch.zeros_like(surprise_UWL[..., 0])
    for level in reversed(range(value_UWL.shape[-1])):
        later = surprise_UWL[..., level] + decay * later
        out.append(later)
    advantage_UWL = torch.stack(out[::-1], -1)
    return advantage_UWL, advantage_UWL + value_UWL
