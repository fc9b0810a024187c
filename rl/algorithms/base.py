"""Algorithm: how an RL stage turns scores into gradients; facts that a plan reads, and two functions that trainers call.

    advantage(rewards, weights, valid_UW, options, reduce) -> Advantages
    loss(policy, options) -> PolicyLoss

`rewards` are tensors [U, W] by name with their `weights`; `reduce` sums a float64 tensor over all ranks. `options` are the
scenario's, as plain data. A loss returns sums and counts, which a trainer divides by the count of all ranks. An algorithm
that is `weighted` is also told, as `draws`, how each group was drawn (None: by a plain beam or by independent draws).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from nonet.options import Positive, Rate, StrictModel
from nonet.plugins import PluginRegistry

if TYPE_CHECKING:
    from torch import Tensor

Options = Mapping[str, Any]
Clip = Rate | Annotated[list[Rate], Field(min_length=2, max_length=2)]
Normalise = Annotated[
    Literal["group", "gdpo"] | None,
    Field(
        description="group: the weighted sum over its spread in a group; gdpo: each reward by itself, then weighted; by "
        "default gdpo where there are several"
    ),
]


class Moving(StrictModel):
    """A reference that follows the policy."""

    every: Annotated[
        Positive | None, Field(description="steps after which it becomes the policy as it is")
    ] = None
    ema: Annotated[
        float | None, Field(gt=0, lt=1, description="what it keeps of itself a step; the rest is the policy")
    ] = None

    @model_validator(mode="after")
    def _one(self) -> Moving:
        if (self.every is None) == (self.ema is None):
            raise ValueError("reference: give one of every and ema, or frozen")
        return self


class Passes(StrictModel):
    """How often a rollout is learned from; every algorithm has these."""

    epochs: Annotated[Positive, Field(description="passes over a rollout's prompts")] = 1
    minibatches: Annotated[
        Positive, Field(description="optimizer steps a pass, each on a part of the prompts")
    ] = 1


class PolicyGradient(Passes):
    """What algorithms with a KL term have."""

    kl: Annotated[float, Field(ge=0, description="weight of the KL term; 0: no reference is kept")] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"], Field(description="how the KL term is estimated from beams")
    ] = "k3"
    reference: Annotated[
        Literal["frozen"] | Moving,
        Field(description="what the KL is to: the stage's first weights, or {every: 50}, or {ema: 0.99}"),
    ] = "frozen"


def _never(options: Options) -> bool:
    return False


def _nothing(options: Options) -> float:
    return 0.0


def _no_column(options: Options) -> str | None:
    return None


def _once(options: Options) -> float:
    return 1.0


def tokens(valid_UW: Tensor, advantage_UW: Tensor, levels: int) -> float:
    """A loss of codes is divided by all of them."""
    return float(valid_UW.sum()) * levels


def beams(valid_UW: Tensor, advantage_UW: Tensor, levels: int) -> float:
    """A loss of beams is divided by all of them."""
    return float(valid_UW.sum())


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    options          its keys in a scenario; `Passes` and `PolicyGradient` have those that trainers read
    advantage, loss  the functions, or their dotted paths `package.module:name`
    needs_reference  whether trainers keep the stage's first weights as a reference, by its options
    needs_roles      roles that a run must have for it, beside the shipped ones
    needs_target     whether its loss wants the log-probability of what each user took next
    value_rate       the learning rate of a value head of its own; 0: it has none
    oversample       prompts that are asked for, as a multiple of the stage's users
    counted          (valid_UW, advantage_UW, levels) -> what its sums are divided by, over a rank's part of a mini-batch
    more             names of what its losses report besides
    weighted         whether its advantage takes draws: how a group was drawn
    feedback_column  the column of the interactions whose values at the prompts' next events its advantage takes as `feedback_U`
    corrects         what `mismatch.correct` may weigh of it: "token", "sequence"
    """

    options: type[StrictModel]
    advantage: str | Callable[..., Any]
    loss: str | Callable[..., Any]
    needs_reference: Callable[[Options], bool] = _never
    needs_roles: tuple[str, ...] = ()
    needs_target: Callable[[Options], bool] = _never
    value_rate: Callable[[Options], float] = _nothing
    oversample: Callable[[Options], float] = _once
    counted: Callable[[Any, Any, int], float] = tokens
    more: tuple[str, ...] = ()
    weighted: bool = False
    feedback_column: Callable[[Options], str | None] = _no_column
    corrects: tuple[str, ...] = ("sequence",)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a loss is computed from: U users, W beams, L levels.

    logp_UWL      of the model that learns, with a gradient; nats, over legal codes
    old_UWL       of the version that made the beams
    ref_UWL       of the reference; None where the algorithm needs none
    advantage_UW  what `advantage` gave, 0 where a beam is not valid
    valid_UW      which beams there are
    target_UL     of what each user took next, with a gradient, and target_ref_UL of the reference; None unless asked for
    taken_UW      which beams are what their user took next; None unless asked for
    value_UWL     of the value head, with a gradient; None without one
    group_U       what `advantage` gave for groups; None where it gave nothing
    weight_UW     what each beam counts, 1 on average over a group, so that a group's mean is the policy's expectation; None
                  where every beam counts 1
    baseline_UWL  of the value head as it was before the first pass over this rollout; None where this is the first pass
    """

    logp_UWL: Tensor
    old_UWL: Tensor
    advantage_UW: Tensor
    valid_UW: Tensor
    ref_UWL: Tensor | None = None
    target_UL: Tensor | None = None
    target_ref_UL: Tensor | None = None
    taken_UW: Tensor | None = None
    value_UWL: Tensor | None = None
    group_U: Tensor | None = None
    weight_UW: Tensor | None = None
    baseline_UWL: Tensor | None = None


def has_kl(options: Options) -> bool:
    """Only a KL term looks at a reference."""
    return options["kl"] > 0


ALGORITHMS = PluginRegistry("algorithm", Algorithm, "nonet.rl.algorithms")
