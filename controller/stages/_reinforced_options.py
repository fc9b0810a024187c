"""The scenario options of a reinforced stage: its algorithm, rollout, rewards and checkpoint selection."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from nonet.controller.scenario import Best, BetweenStep, RewardOptions, StageOptions
from nonet.options import Count, Positive, Rate, StrictModel, Word
from nonet.plugins import PluginRegistry
from nonet.replaceable import Replaceable
from nonet.rl.algorithms import ALGORITHMS
from nonet.suggest import suggest_inline
from nonet.workers.roles import SceneSetup, Schedule


class AlgorithmOptions(Replaceable):
    """The algorithm of an RL stage, with its own keys."""

    default: ClassVar[str] = "rloo"
    registry: ClassVar[PluginRegistry[Any] | None] = ALGORITHMS


class _Drawing(StrictModel):
    """The keys that every rollout has."""

    width: Annotated[int, Field(ge=2, description="items per prompt")] = 16
    with_target: Annotated[
        bool,
        Field(
            description="whether the item that the user took next is added to every prompt's items, with a corrected weight"
        ),
    ] = False
    correct: Annotated[
        bool,
        Field(
            description="whether drawn items are weighted so that a prompt's weighted sum estimates the policy's expectation"
        ),
    ] = True
    catalogue: str | None = None
    staleness: Count = 0
    precision: Annotated[
        Literal["fp32", "bf16"],
        Field(description="the precision in which rollouts compute; served lists are computed in fp32"),
    ] = "fp32"


class BeamRollout(_Drawing):
    """A rollout by beam search, with some items drawn from outside the beam."""

    tail: Annotated[Count, Field(description="how many of the items are drawn from outside the beam")] = 0

    @model_validator(mode="after")
    def _check_room(self) -> BeamRollout:
        if self.tail + self.with_target >= self.width:
            raise ValueError(f"tail: {self.tail} leaves no beam of width {self.width}")
        return self


class SampledRollout(_Drawing):
    """A rollout that samples each item level by level."""

    temperature: Annotated[
        Rate, Field(description="the sampling temperature; 1 samples from the policy itself")
    ] = 1.0
    top_p: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="sampling is restricted to each level's likeliest codes that together have this probability",
        ),
    ] = 1.0


class RolloutOptions(Replaceable):
    """The rollout of an RL stage, with its own keys."""

    default: ClassVar[str] = "gumbel"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {
        "beam": BeamRollout,
        "sample": SampledRollout,
        "gumbel": _Drawing,
    }

    @property
    def drawing(self) -> _Drawing:
        """The keys that every rollout has."""
        options = self.get_options()
        return _Drawing(**{key: options[key] for key in _Drawing.model_fields})


class Mismatch(StrictModel):
    """The correction of differences between the probabilities of rollouts and of trainers (`nonet.rl.mismatch`)."""

    correct: Annotated[
        Literal["none", "token_truncate", "token_clip", "token_mask", "sequence_truncate", "sequence_mask"],
        Field(
            description="the importance weights of the trainer over the rollout; none: they are only measured"
        ),
    ] = "none"
    cap: Annotated[
        float, Field(gt=1, description="the largest weight; masks also leave out weights below 1 / cap")
    ] = 2.0
    stop_at_kl: Annotated[
        Rate | None,
        Field(
            description="the KL divergence per level, in nats, above which a step is not learned from; three in a row end the run"
        ),
    ] = None

    @field_validator("correct")
    @classmethod
    def _resolve_alias(cls, correct: str) -> str:
        """Return "token_truncate" for "token_clip", which is another name of it."""
        return "token_truncate" if correct == "token_clip" else correct


class Scene(StrictModel):
    """The options of prompts whose event has one value of the scenes' column."""

    catalogue: Annotated[
        str | None,
        Field(
            description="which items may be recommended: a condition on items, or an item column that is true"
        ),
    ] = None
    rewards: Annotated[
        list[Word] | None, Field(description="the rewards that count; by default all of the stage")
    ] = None
    weights: Annotated[
        dict[Word, float], Field(description="the weights of rewards that replace those of the stage")
    ] = {}


class Scenes(StrictModel):
    """Groups of prompts with options of their own, by the value of a column of their events."""

    column: Annotated[Word, Field(description="a column of the interactions; event: the kind of event")]
    of: Annotated[
        dict[str, Scene],
        Field(
            min_length=1,
            description="the options of each scene, by the value of the column; other events have those of the stage",
        ),
    ]


class ControlOptions(StrictModel):
    """The supervised control of an RL stage."""

    lr: Annotated[
        Rate | None,
        Field(
            description="the peak learning rate of the control, tuned like that of RL; by default that of the stage before RL"
        ),
    ] = None
    rerank: Annotated[
        bool | None,
        Field(
            description="whether lists are re-ranked by the rewards; by default where that takes less than two minutes"
        ),
    ] = None


class Reinforced(StageOptions):
    """The keys of a reinforced stage."""

    kind_name: ClassVar[str] = "reinforced"
    steps: Positive
    users: Positive = 64
    lr: Rate | Schedule = 1e-4
    sparse_lr: Annotated[
        Rate | None,
        Field(
            description="the peak learning rate of sparse rows, on the schedule of lr; by default they are frozen"
        ),
    ] = None
    algorithm: AlgorithmOptions = AlgorithmOptions()
    rollout: RolloutOptions = RolloutOptions()
    rewards: dict[Word, RewardOptions]
    mismatch: Mismatch | None = None
    between: list[BetweenStep] = []
    scenes: Annotated[
        Scenes | None,
        Field(
            description="another catalogue, other rewards and other weights by the value of a column; metrics are given by scene"
        ),
    ] = None
    best: Annotated[
        Best | Literal["last"],
        Field(
            description=f"which step is selected by the validations, by default {{by: {Best().by}, least: {Best().least}}}; "
            "last: the last step"
        ),
    ] = Best()
    control: Annotated[
        bool | ControlOptions,
        Field(
            description="what RL is compared with: finetuning continued on RL's events, once with as many passes and once "
            "with as much computation, and the lists of the start re-ranked by the rewards; {lr} is the rate of the first "
            "two; false: nothing"
        ),
    ] = True
    probe: Annotated[
        Positive,
        Field(
            description="how many prompts of held-out users, drawn by the seed, rewards are compared on before and after"
        ),
    ] = 2000

    def count_prompts(self) -> int:
        """Return the number of prompts of a step: the stage's users, increased if the algorithm drops some prompts."""
        return math.ceil(self.users * self.algorithm.spec.oversample(self.algorithm.get_options()))

    def make_scenes(self) -> SceneSetup | None:
        """Return the scenes of the stage.

        A stage without scenes whose rollout has a catalogue gets one scene for all prompts. A stage with neither gets None.
        """
        default_catalogue, scenes = self.rollout.drawing.catalogue, self.scenes
        if scenes is None:
            one_scene = SceneSetup(column="", names=(), catalogue=(default_catalogue,), weights=())
            return one_scene if default_catalogue else None
        # By scene: weight 0 for each reward that the scene does not list, and the weights that it replaces.
        scene_weights = [
            dict.fromkeys(
                set(self.rewards) - set(self.rewards if scene.rewards is None else scene.rewards),
                0.0,
            )
            | scene.weights
            for scene in scenes.of.values()
        ]
        catalogues = (
            *(scene.catalogue or default_catalogue for scene in scenes.of.values()),
            default_catalogue,
        )
        return SceneSetup(scenes.column, tuple(scenes.of), catalogues, tuple(scene_weights))

    @model_validator(mode="after")
    def _check_rewards(self) -> Reinforced:
        """Raise ValueError if there is no reward, or if a scene names a reward that the stage cannot weigh."""
        if self.rollout.use not in self.rollout.shipped:
            raise ValueError(
                f"rollout.use: {self.rollout.use!r} is code of your own, which no run supports; choose "
                f"{', '.join(self.rollout.shipped)}"
            )
        if not self.rewards:
            raise ValueError("rewards: name at least one, e.g. {hit: {weight: 1.0}}")
        for scene_name, scene in (self.scenes.of if self.scenes else {}).items():
            for name in [*(scene.rewards or ()), *scene.weights]:
                if name not in self.rewards:
                    raise ValueError(
                        f"scenes.of.{scene_name}: the stage has no reward {name!r}{suggest_inline(name, list(self.rewards))}; "
                        f"rewards: {', '.join(self.rewards)}"
                    )
                if self.rewards[name].at_least is not None:
                    raise ValueError(
                        f"scenes.of.{scene_name}: {name} has a floor, whose multiplier is its weight in all scenes"
                    )
        correct = self.mismatch.correct if self.mismatch else "none"
        granularity, supported = correct.split("_")[0], self.algorithm.spec.corrects
        if correct != "none" and granularity not in supported:
            fit = f"{correct.replace('token', 'sequence')} does" if "sequence" in supported else "none does"
            raise ValueError(
                f"mismatch.correct: {correct} does not go with algorithm {self.algorithm.use}; {fit}"
            )
        return self
