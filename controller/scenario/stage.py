"""Stages of a scenario: the keys that every stage has, and the interface of a stage kind (`StageKind`).

`use:` names the kind of a stage; a stage without it is of the first kind that claims its keys. The rest of the controller
distinguishes kinds only through the attributes and methods of `StageKind`. These methods have no side effects; the training
loop, which has, is the attribute `loop`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from nonet.controller.scenario.parts import Role, StageChecks, StagePlanning
from nonet.errors import ConfigError
from nonet.options import Positive, Rate, StrictModel, Word
from nonet.plugins import HERE, PluginFiles, PluginRegistry
from nonet.replaceable import get_files
from nonet.verbs import ALL_VERBS, STEERING_VERBS, SupportedVerbs
from nonet.workers.engines import OptimizerOptions, PrecisionOptions
from nonet.workers.roles import CHUNK_TOKENS, Schedule
from nonet.yaml import is_map


class Stop(StrictModel):
    """The condition under which a supervised stage stops before its last step."""

    patience: Annotated[
        Positive,
        Field(description="validations without improvement after which the stage stops; off: all steps run"),
    ] = 3
    by: Annotated[
        str | None,
        Field(
            description="the metric that chooses the best checkpoint, or nats; by default checkpoint.keep.best"
        ),
    ] = None


class Best(StrictModel):
    """The rule that chooses the best step of an RL stage from its validations."""

    by: Annotated[
        str,
        Field(
            description="reward: the highest trained reward of validation prompts among steps that keep floors and `least`; "
            "or a metric; or last: the last step, which is validated too"
        ),
    ] = "reward"
    least: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="the share of checkpoint.keep.best's metric before the stage that must be kept",
        ),
    ] = 0.98


class BatchSize(StrictModel):
    """The size of a global batch, either in positions (`tokens`) or in users."""

    tokens: Rate | None = None
    users: Positive | None = None

    @model_validator(mode="after")
    def _check_one_unit(self) -> BatchSize:
        """Check that exactly one of tokens and users is given."""
        if (self.tokens is None) == (self.users is None):
            raise ValueError("give one of tokens and users")
        return self


class Chunk(StrictModel):
    """The largest part of a batch that a worker computes at once."""

    tokens: Annotated[
        Rate,
        Field(
            description="the most positions that a worker computes at once; fewer on a device with less memory"
        ),
    ] = float(CHUNK_TOKENS)


class StageOptions(StrictModel):
    """Options that every stage has; a kind adds its own keys in a subclass.

    Attributes:
        kind_name: The name of the kind of these options, for stages without `use`.
    """

    kind_name: ClassVar[str] = ""
    use: Annotated[
        str | None, Field(description="the kind of stage, if it does not follow from the keys")
    ] = None
    chunk: Chunk = Chunk()
    lr: Rate | Schedule = 1e-3
    optimizer: OptimizerOptions = OptimizerOptions()
    precision: PrecisionOptions = PrecisionOptions()
    roles: Annotated[dict[Word, Role], Field(description="roles that apply in this stage only")] = {}
    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="after")
    def _set_files(self, info: ValidationInfo) -> StageOptions:
        """Store the location of the user's own files, which the validation context holds."""
        self._files = get_files(info)
        return self

    def choose_optimizer(self, supported: Sequence[str]) -> StageOptions:
        """Return the options with an optimizer that an engine supports.

        An optimizer that the scenario names is kept. If the default is not supported, it becomes the first supported one.

        Args:
            supported: The names of the supported optimizers.
        """
        optimizer = self.optimizer
        if optimizer.use in supported or "use" in optimizer.model_fields_set:
            return self
        return self.model_copy(update={"optimizer": optimizer.model_copy(update={"use": supported[0]})})

    @property
    def kind(self) -> StageKind:
        """The kind of the stage. Raises ConfigError if there is no kind of its name."""
        return STAGES.get(self.use or self.kind_name, self._files)

    @property
    def learner(self) -> str:
        """The reference of the learner of the stage's kind, with an absolute path; "" for the learner of the model."""
        return self._files.make_absolute(self.kind.learner)

    @property
    def address(self) -> str:
        """The name or reference of the kind, with an absolute path, so that other processes find it."""
        return self._files.make_absolute(self.use or self.kind_name)


class StageKind(StagePlanning, StageChecks):
    """A kind of stage: its keys, loop and learner, what a plan computes of its stages, and the checks of what they need.

    Methods receive the options of one stage, an instance of `options`, as `stage_options`.

    Attributes:
        plan_name: The name of the kind in plans.
        options: The class of the options of its stages.
        learner: Dotted path of the StageLearner that trains it; "" for the model's own (`ModelSpec.learner`).
        loop: A function (session, name, recorder, stopped) that runs a stage and returns whether it was completed, or the
            dotted path of the function.
        roles: Roles that work in a stage; "name." stands for the groups that the stage adds, whose names begin with its own.
        trainer_phases: Two phases of the trainer (see `list_phases`): the one in which it learns, and the one in which it
            is saved, loaded or published.
        rolls_out: Whether stages of the kind have prompts, beams and rewards.
        takes: Kinds of artifacts that a stage reads, besides the model of the previous stage.
        no_model: Kinds of artifacts that a stage reads in place of a model if it is the first one.
        validates: Whether the loop validates while it trains, and the stage ends with its best checkpoint.
        aligns: Whether the stage teaches a model what semantic ids mean in words.
    """

    plan_name: ClassVar[str] = "supervised"
    options: ClassVar[type[StageOptions]] = StageOptions
    loop: ClassVar[str | Callable[..., bool]] = ""
    learner: ClassVar[str] = ""
    roles: ClassVar[tuple[str, ...]] = ("trainer", "embedding")
    trainer_phases: ClassVar[tuple[str, str]] = ("train", "train")
    rolls_out: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("sequences", "sids")
    no_model: ClassVar[tuple[str, ...]] = ()
    validates: ClassVar[bool] = False
    aligns: ClassVar[bool] = False

    @property
    def verbs(self) -> SupportedVerbs:
        """The verbs that work for runs in which a stage of the kind has a part; rewards are changed only where it has some."""
        if self.rolls_out:
            return ALL_VERBS
        lacks = dict.fromkeys(STEERING_VERBS, "has no rewards to change; add an RL stage with rewards")
        return SupportedVerbs(lacks=lacks)

    def can_claim(self, keys: set[str]) -> bool:
        """Return whether a stage with these keys and without `use` is of this kind.

        Args:
            keys: The keys of the stage in the scenario.
        """
        return False

    def make_rollout_options(self, stage_options: Any) -> dict[str, Any]:
        """Return the options that rollouts receive, among them `width`, the number of beams per prompt."""
        return {"width": self.get_width(stage_options)}

    def make_scenes(self, stage_options: Any) -> Any:
        """Return the scenes of the prompts (`SceneSetup`); None if the stage has no scenes."""
        return None

    @abstractmethod
    def compute_lengths(self, stage_options: Any, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of `StageSetup` that depend on the data: at least `steps`, and `users`, the users per step.

        Args:
            stage_options: The options of the stage.
            users: The number of rows (users, or events for some models) in an epoch.
            events: The number of training events.
        """
        raise NotImplementedError


def _run_loop(session: Any, name: str, recorder: Any, stopped: Any) -> bool:
    """Declare the arguments of `StageKind.loop`, for the check of plug-ins; it is never called."""
    raise NotImplementedError


STAGES = PluginRegistry("stage", StageKind, "nonet.controller.stages", contract={"loop": _run_loop})


def parse_stage(value: Any, info: ValidationInfo) -> Any:
    """Validate the keys of a stage with the option class of its kind, and return the options.

    Args:
        value: The keys; options that are validated already are returned as they are.
        info: The validation context, with the location of the user's own files.

    Raises:
        ValueError: There is no kind of the name in `use`.
        ValidationError: A key is wrong.
    """
    if isinstance(value, StageOptions):
        return value
    try:
        kind = find_kind(value, get_files(info))
    except ConfigError as error:
        raise ValueError(f"use: {error}") from None
    return kind.options.model_validate(value, context=info.context)


def find_kind(value: Any, files: PluginFiles = HERE) -> StageKind:
    """Return the kind that `use` names, else the first shipped kind that claims the keys, else "supervised".

    Args:
        value: The keys of a stage.
        files: The location of the user's own files.

    Raises:
        ConfigError: There is no kind of that name.
    """
    stage_keys = value if is_map(value) else {}
    if "use" in stage_keys:
        return STAGES.get(stage_keys["use"], files)
    shipped = [STAGES.get(name) for name in STAGES.list_shipped()]
    return next((kind for kind in shipped if kind.can_claim(set(stage_keys))), STAGES.get("supervised"))
