"""The scenario options of a reinforced stage: its algorithm, rollout, rewards and checkpoint selection."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from nonet.controller.scenario import Best, BetweenStep, RewardOptions, StageOptions
from nonet.options import Count, Positive, Rate, StrictModel, Word
from nonet.plugins import PluginRegistry
from nonet.replaceable import Replaceable
from nonet.rl.algorithms import ALGORITHMS
from nonet.suggest import suggest_inline
from nonet.workers.roles import Schedule


class AlgorithmOptions(Replaceable):
    default: ClassVar[str] = "rloo"
    registry: ClassVar[PluginRegistry[Any] | None] = ALGORITHMS


class _Drawing(StrictModel):
    """What every rollout has."""

    width: Annotated[int, Field(ge=2, description="items per prompt")] = 16
    with_target: Annotated[
        bool, Field(description="whether what the user took next is in every group, beside its correction")
    ] = False
    correct: Annotated[
        bool, Field(description="whether drawn items weigh what makes a group's sum the policy's expectation")
    ] = True
    catalogue: str | None = None
    staleness: Count = 0
    precision: Annotated[
        Literal["fp32", "bf16"], Field(description="what rollouts compute in; what is served is fp32")
    ] = "fp32"


class BeamRollout(_Drawing):
    tail: Annotated[
        Count, Field(description="of the width, how many are drawn from what is outside the beam")
    ] = 0

    @model_validator(mode="after")
    def _check_room(self) -> BeamRollout:
        if self.tail + self.with_target >= self.width:
            raise ValueError(f"tail: {self.tail} leaves no beam of width {self.width}")
        return self


class SampledRollout(_Drawing):
    temperature: Annotated[Rate, Field(description="1: the policy itself")] = 1.0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="share of each level's likeliest codes that is drawn from")
    ] = 1.0


class RolloutOptions(Replaceable):
    default: ClassVar[str] = "gumbel"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {
        "beam": BeamRollout,
        "sample": SampledRollout,
        "gumbel": _Drawing,
    }


class Mismatch(StrictModel):
    """What is done about rollouts that compute otherwise than trainers (`nonet.rl.mismatch`)."""

    correct: Annotated[
        Literal["none", "token_truncate", "token_clip", "token_mask", "sequence_truncate", "sequence_mask"],
        Field(description="importance weights of the trainer over the rollout; none: measured alone"),
    ] = "none"
    cap: Annotated[
        float, Field(gt=1, description="the largest weight; masks leave out what is below 1 / cap too")
    ] = 2.0
    stop_at_kl: Annotated[
        Rate | None,
        Field(description="nats a level above which a step is not learned from; three in a row end the run"),
    ] = None

    @field_validator("correct")
    @classmethod
    def _unify_name(cls, correct: str) -> str:
        return "token_truncate" if correct == "token_clip" else correct


class Scene(StrictModel):
    """What is different where events have one value of the scenes' column."""

    catalogue: Annotated[
        str | None,
        Field(description="a condition on items, or a column of them that is true: what may be recommended"),
    ] = None
    rewards: Annotated[
        list[Word] | None, Field(description="those that count; by default all of the stage's")
    ] = None
    weights: Annotated[dict[Word, float], Field(description="what rewards count instead")] = {}


class Scenes(StrictModel):
    column: Annotated[Word, Field(description="of the interactions; event: the kind of event")]
    of: Annotated[
        dict[str, Scene], Field(min_length=1, description="by value; others have what the stage says")
    ]


class ControlOptions(StrictModel):
    """The supervised control of an RL stage."""

    lr: Annotated[
        Rate | None,
        Field(description="its peak rate, tuned as RL's was; by default that of the stage before RL"),
    ] = None
    rerank: Annotated[
        bool | None,
        Field(
            description="whether lists are re-ranked by the rewards; by default where that takes less than two minutes"
        ),
    ] = None


class Reinforced(StageOptions):
    kind_name: ClassVar[str] = "reinforced"
    steps: Positive
    users: Positive = 64
    lr: Rate | Schedule = 1e-4
    sparse_lr: Annotated[
        Rate | None,
        Field(description="peak rate that sparse rows learn at, on lr's schedule; left out: frozen"),
    ] = None
    algorithm: AlgorithmOptions = AlgorithmOptions()
    rollout: RolloutOptions = RolloutOptions()
    rewards: dict[Word, RewardOptions]
    mismatch: Mismatch | None = None
    between: list[BetweenStep] = []
    scenes: Annotated[
        Scenes | None,
        Field(
            description="by a column's value: another catalogue, other rewards, other weights; metrics by scene"
        ),
    ] = None
    best: Annotated[
        Best | Literal["last"],
        Field(
            description="which step goes on, by validations: {by: reward, least: 0.98} by default; last: the last one"
        ),
    ] = Best()
    control: Annotated[
        bool | ControlOptions,
        Field(
            description="what RL is compared with: finetuning continued on RL's events, with as many passes and with as much "
            "computing, and finetune's lists re-ranked by the rewards; {lr} is the rate of the first two; false: nothing"
        ),
    ] = True
    probe: Annotated[
        Positive,
        Field(
            description="prompts of held-out users that rewards are compared on before and after, drawn by the seed"
        ),
    ] = 2000

    @model_validator(mode="after")
    def _check_rewards(self) -> Reinforced:
        """Raise ValueError if there is no reward, or if a scene names a reward that the stage cannot weigh."""
        if not self.rewards:
            raise ValueError("rewards: name at least one, e.g. {hit: {weight: 1.0}}")
        for value, scene in (self.scenes.of if self.scenes else {}).items():
            for name in [*(scene.rewards or ()), *scene.weights]:
                if name not in self.rewards:
                    raise ValueError(
                        f"scenes.of.{value}: the stage has no reward {name!r}{suggest_inline(name, list(self.rewards))}; "
                        f"rewards: {', '.join(self.rewards)}"
                    )
                if self.rewards[name].at_least is not None:
                    raise ValueError(
                        f"scenes.of.{value}: {name} has a floor, whose multiplier is its weight in all scenes"
                    )
        correct = self.mismatch.correct if self.mismatch else "none"
        level, corrects = correct.split("_")[0], self.algorithm.spec.corrects
        if correct != "none" and level not in corrects:
            other = f"{correct.replace('token', 'sequence')} does" if "sequence" in corrects else "none does"
            raise ValueError(
                f"mismatch.correct: {correct} does not go with algorithm {self.algorithm.use}; {other}"
            )
        return self
