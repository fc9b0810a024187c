"""Algorithm: how an RL stage turns scores into gradients; facts that a plan reads, and two functions that trainers call.

    advantage(rewards, weights, valid_UW, options, reduce) -> Advantages
    loss(policy, options) -> PolicyLoss

`rewards` are tensors [U, W] by name with their `weights`; `reduce` sums a float64 tensor over all ranks. `options` are the
scenario's, as plain data. A loss returns sums and counts, which a trainer divides by the count of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nonet.options import StrictModel
from nonet.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

Options = Mapping[str, Any]


def _never(options: Options) -> bool:
    return False


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    options          its keys in a scenario
    advantage, loss  the functions, or their dotted paths `package.module:name`
    needs_reference  whether trainers keep the stage's first weights as a reference, by its options
    needs_roles      roles that a run must have for it, beside the shipped ones
    """

    options: type[StrictModel]
    advantage: str | Callable[..., Any]
    loss: str | Callable[..., Any]
    needs_reference: Callable[[Options], bool] = _never
    needs_roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """What a loss is computed from: U users, W beams, L levels.

    logp_UWL      of the model that learns, with a gradient; nats, over legal codes
    old_UWL       of the version that made the beams
    ref_UWL       of the reference; None where the algorithm needs none
    advantage_UW  what `advantage` gave, 0 where a beam is not valid
    valid_UW      which beams there are
    """

    logp_UWL: Tensor
    old_UWL: Tensor
    advantage_UW: Tensor
    valid_UW: Tensor
    ref_UWL: Tensor | None = None


ALGORITHMS = Registry("algorithm", Algorithm, "nonet.rl.algorithms")
