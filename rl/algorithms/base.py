"""Algorithm: how an RL stage turns rewards into gradients.

An algorithm has attributes that the planner reads, and two functions that trainers call:

    advantage(rewards, weights, valid_UW, options, reduce) -> Advantages
    loss(policy, options) -> PolicyLoss

`rewards` are tensors [U, W] by name, and `weights` their weights by name; `reduce` sums a float64 tensor over all ranks.
`options` are the algorithm's options in the scenario, as plain data; `policy` is a LossInputs. A loss returns sums and counts,
which a trainer divides by the count of all ranks. If `Algorithm.weighted` is set, `advantage` also receives `draws`: how each
group was drawn (None for a plain beam search or independent draws).
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


class MovingReference(StrictModel):
    """Options of a reference model that follows the policy."""

    every: Annotated[
        Positive | None, Field(description="steps after which it becomes the policy as it is")
    ] = None
    ema: Annotated[
        float | None, Field(gt=0, lt=1, description="what it keeps of itself a step; the rest is the policy")
    ] = None

    @model_validator(mode="after")
    def _check_one(self) -> MovingReference:
        """Check that exactly one of `every` and `ema` is given."""
        if (self.every is None) == (self.ema is None):
            raise ValueError("reference: give one of every and ema, or frozen")
        return self


class RolloutPasses(StrictModel):
    """Options for how often a rollout is trained on; every algorithm has these."""

    epochs: Annotated[Positive, Field(description="passes over a rollout's prompts")] = 1
    minibatches: Annotated[
        Positive, Field(description="optimizer steps a pass, each on a part of the prompts")
    ] = 1


class PolicyGradient(RolloutPasses):
    """Options of algorithms with a KL term."""

    kl: Annotated[float, Field(ge=0, description="weight of the KL term; 0: no reference is kept")] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"], Field(description="how the KL term is estimated from beams")
    ] = "k3"
    reference: Annotated[
        Literal["frozen"] | MovingReference,
        Field(description="what the KL is to: the stage's first weights, or {every: 50}, or {ema: 0.99}"),
    ] = "frozen"


def _return_false(options: Options) -> bool:
    return False


def _return_zero(options: Options) -> float:
    return 0.0


def _return_none(options: Options) -> str | None:
    return None


def _return_one(options: Options) -> float:
    return 1.0


def count_tokens(valid_UW: Tensor, advantage_UW: Tensor, levels: int) -> float:
    """Count the codes of the valid beams."""
    return float(valid_UW.sum()) * levels


def count_beams(valid_UW: Tensor, advantage_UW: Tensor, levels: int) -> float:
    """Count the valid beams."""
    return float(valid_UW.sum())


@dataclass(frozen=True)
class Algorithm:
    """A kind of RL algorithm: its advantages, loss and options.

    Attributes:
        options: The class of the algorithm's options in a scenario; trainers read those of `RolloutPasses` and `PolicyGradient`.
        advantage: The function that computes advantages, or its dotted path `package.module:name`.
        loss: The function that computes the loss, or its dotted path.
        needs_reference: Returns whether trainers keep the stage's first weights as a reference, given the options.
        needs_target: Returns whether the loss needs the log-probability of each user's next event.
        value_rate: Returns the learning rate of a value head; 0 for no value head.
        oversample: Returns the number of prompts requested, as a multiple of the stage's users.
        counted: Maps (valid_UW, advantage_UW, levels) to the divisor of the sums, for a rank's part of a mini-batch.
        more: Names of the additional sums that the loss reports.
        weighted: Whether `advantage` takes `draws`: how a group was drawn.
        feedback_column: Returns the column of the interactions whose values at the prompts' next events `advantage` takes as
            `feedback_U`.
        corrects: Levels at which `mismatch.correct` may weight the advantages: "token", "sequence".
    """

    options: type[StrictModel]
    advantage: str | Callable[..., Any]
    loss: str | Callable[..., Any]
    needs_reference: Callable[[Options], bool] = _return_false
    needs_target: Callable[[Options], bool] = _return_false
    value_rate: Callable[[Options], float] = _return_zero
    oversample: Callable[[Options], float] = _return_one
    counted: Callable[[Any, Any, int], float] = count_tokens
    more: tuple[str, ...] = ()
    weighted: bool = False
    feedback_column: Callable[[Options], str | None] = _return_none
    corrects: tuple[str, ...] = ("sequence",)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The input of a loss: log-probabilities and advantages of U users, W beams and L levels.

    Attributes:
        logp_UWL: Log-probabilities in nats over legal codes under the model that is trained, with a gradient.
        old_UWL: Log-probabilities under the version that generated the beams.
        advantage_UW: Advantages, 0 where a beam is invalid.
        valid_UW: Mask of the valid beams.
        ref_UWL: Log-probabilities under the reference; None if the algorithm needs none.
        target_UL: Log-probabilities of each user's next event, with a gradient; None unless `needs_target` requests them.
        target_ref_UL: The same under the reference.
        taken_UW: Mask of the beams that equal their user's next event; None unless requested.
        value_UWL: Values of the value head, with a gradient; None without one.
        group_U: Group weights that `advantage` returned; None if it returned none.
        weight_UW: Weight of each beam, 1 on average over a group, so that a group's mean is the policy's expectation; None if
            every beam has weight 1.
        baseline_UWL: Values from before the first pass over this rollout; None in the first pass.
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
    """Return whether the loss has a KL term and so needs a reference."""
    return options["kl"] > 0


def _compute_advantages(
    rewards: Any, weights: Any, valid_UW: Any, options: Any, reduce: Any, **drawn: Any
) -> Any:
    """Declare the arguments of `Algorithm.advantage`, to which plug-ins are compared; `drawn` are draws and feedback_U."""


def _compute_loss(policy: Any, options: Any) -> Any:
    """Declare the arguments of `Algorithm.loss`, to which plug-ins are compared."""


ALGORITHMS = PluginRegistry(
    "algorithm",
    Algorithm,
    "nonet.rl.algorithms",
    contract={"advantage": _compute_advantages, "loss": _compute_loss},
)
