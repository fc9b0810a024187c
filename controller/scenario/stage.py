"""Stages of a scenario: the keys that all kinds have, and what a kind says of itself.

A kind is found by `use:`, or by its keys where a stage names none. `StageKind` is what the rest of the controller asks: nobody
else tells kinds apart. Its methods are pure; the loop, which is not, is named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from nonet.controller.scenario.options import Role
from nonet.controller.scenario.replaceable import files_of
from nonet.controller.scenario.yaml import is_map
from nonet.options import Positive, Rate, Share, StrictModel, Word
from nonet.plugins import HERE, PluginFiles, PluginRegistry
from nonet.workers.roles import CHUNK_TOKENS


class Schedule(StrictModel):
    peak: Rate
    warmup: Share = 0.05
    decay: Literal["cosine", "linear", "none"] = "cosine"


class Stop(StrictModel):
    patience: Annotated[
        Positive,
        Field(description="validations without a better one after which the stage stops; off: all steps run"),
    ] = 3


class Best(StrictModel):
    """Which step of a reinforced stage goes on, by its validations."""

    by: Annotated[
        str,
        Field(
            description="reward: the highest trained reward of validation prompts, of steps that hold floors and `least`; "
            "or a metric; or last: the last one, validated all the same"
        ),
    ] = "reward"
    least: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="share that checkpoint.keep.best's metric must keep of what it was before the stage",
        ),
    ] = 0.98


class BatchSize(StrictModel):
    tokens: Rate | None = None
    users: Positive | None = None

    @model_validator(mode="after")
    def _one(self) -> BatchSize:
        if (self.tokens is None) == (self.users is None):
            raise ValueError("give one of tokens and users")
        return self


class Chunk(StrictModel):
    tokens: Annotated[
        Rate,
        Field(
            description="positions that a worker computes at once, at most; a device with less room has fewer"
        ),
    ] = float(CHUNK_TOKENS)


class OptimizerOptions(StrictModel):
    """How a stage's dense part learns. A word alone, such as `optimizer: adamw`, means `{use: adamw}`."""

    use: Annotated[
        Literal["muon", "adamw"],
        Field(
            description="muon for hidden matrices and AdamW for the rest, or AdamW for all; left out, muon, or adamw where the "
            "engine does not step muon"
        ),
    ] = "muon"
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip: Annotated[Rate, Field(description="the norm that gradients are cut to")] = 1.0
    clip_rows: Annotated[
        bool,
        Field(description="the norm is that of dense and sparse gradients together, and both are cut to it"),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


class PrecisionOptions(StrictModel):
    """In what a stage's losses are computed; weights, gradients and optimizer stay fp32."""

    use: Literal["fp32", "bf16", "fp16"] = "fp32"
    scale: Annotated[
        Rate,
        Field(description="what fp16's losses are multiplied by at first; halved where gradients overflow"),
    ] = 65536.0
    grow_every: Annotated[
        Positive, Field(description="steps that moved after which the scale is doubled")
    ] = 2000


class StageOptions(StrictModel):
    """What every stage has; a kind adds its own keys."""

    kind_name: ClassVar[str] = ""
    use: Annotated[str | None, Field(description="the kind of stage, where its keys do not tell")] = None
    chunk: Chunk = Chunk()
    lr: Rate | Schedule = 1e-3
    optimizer: OptimizerOptions = OptimizerOptions()
    precision: PrecisionOptions = PrecisionOptions()
    roles: Annotated[dict[Word, Role], Field(description="roles as they are in this stage alone")] = {}
    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="after")
    def _located(self, info: ValidationInfo) -> StageOptions:
        self._files = files_of(info)
        return self

    def with_optimizer_of(self, supported: Sequence[str]) -> StageOptions:
        """Return the stage with the first of the supported optimizers, where it names none and its default is not among them."""
        optimizer = self.optimizer
        if optimizer.use in supported or "use" in optimizer.model_fields_set:
            return self
        return self.model_copy(update={"optimizer": optimizer.model_copy(update={"use": supported[0]})})

    @property
    def kind(self) -> StageKind:
        """What this stage is. Raises ConfigError."""
        return STAGES.get(self.use or self.kind_name, self._files)

    @property
    def learner(self) -> str:
        """The learner that the stage's kind names, as other processes find it; "" for the model's own."""
        return self._files.make_absolute(self.kind.learner)

    @property
    def address(self) -> str:
        """The kind's name, as other processes find it."""
        return self._files.make_absolute(self.use or self.kind_name)


@dataclass(frozen=True, slots=True)
class OwnWorkers:
    """Workers that a stage brings along beside the roles: a reward, a step between. `where`: its path in the scenario."""

    name: str
    where: str
    pool: str | None
    workers: int
    runs: bool = True


class PlannedGroup(Protocol):
    """What a kind may ask of a group of processes that a plan has placed."""

    @property
    def name(self) -> str: ...
    @property
    def roles(self) -> tuple[str, ...]: ...
    @property
    def resource(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def devices(self) -> float: ...


class StageKind:
    """A kind of stage, by default one whose trainers learn from batches and whose rollouts rest.

    plan_name   as plans call it
    options     its keys
    learner     dotted path of the StageLearner that trains it; "" for the model's own (`ModelSpec.learner`)
    loop        (session, name, recorder, stopped) -> whether it came to its end, or the dotted path of that function
    roles       that work in it; `name.` stands for the workers it brings along
    trainer_phases  of the trainer: (when it learns, when it is saved, loaded or published)
    rolls_out   whether there are prompts, beams and rewards in it
    takes       artifacts, beside the model before
    validates   whether its loop asks for validations while it trains, and its best commit goes on
    aligns      whether it teaches a model what semantic ids mean in words
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

    def can_claim(self, keys: set[str]) -> bool:
        """Whether a stage with these keys and no `use` is of this kind."""
        return False

    def list_phases(self, body: Any) -> dict[str, tuple[str, ...]]:
        """Who works at once, phase by phase: roles, "reward" for the workers it brings along. Everybody else rests."""
        return {"train": ("trainer", "embedding", "evaluator")}

    def list_own_workers(self, stage: str, body: Any) -> Iterator[OwnWorkers]:
        """Workers that it brings along."""
        return iter(())

    def find_unsupported(self, path: str, body: Any) -> Iterator[str]:
        """Keys that can be planned and not run."""
        return iter(())

    def list_item_columns(self, body: Any) -> tuple[str, ...]:
        """Columns of the items that it reads."""
        return ()

    def check_groups(self, name: str, body: Any, groups: tuple[PlannedGroup, ...]) -> None:
        """Raise ConfigError where the stage cannot run in the groups that are planned for it."""

    def check_data(self, name: str, body: Any, seq: Any) -> None:
        """Raise ConfigError where these sequences have nothing for the stage."""

    # --- sizes ------------------------------------------------------------------------------------------------------

    def get_width(self, body: Any) -> int:
        """Beams a prompt; 0 where there are none."""
        return 0

    def make_rollout_options(self, body: Any) -> dict[str, Any]:
        """What rollouts are told of a stage: at least `width`."""
        return {"width": self.get_width(body)}

    def make_scenes(self, body: Any) -> Any:
        """Its scenes (`SceneSetup`); None where all prompts are one."""
        return None

    def needs_reference(self, body: Any) -> bool:
        """Whether trainers keep the stage's first weights."""
        return False

    def count_old_versions(self, body: Any) -> int:
        """Return how many published versions of the weights trainers keep to compare rollouts with."""
        return 0

    def count_stored_row_steps(self, body: Any) -> int:
        """Return the number of steps whose sparse rows trainers store before they change, to compare with later; 0 if none."""
        return 0

    def find_least_users(self, body: Any) -> tuple[int | None, str]:
        """Users of a step where the scenario says so, and the key that does."""
        return None, "users"

    def count_unit_tokens(self, scenario: Any, body: Any, size: Any) -> float:
        """Positions of what a chunk is counted in: 1, or those of a prompt."""
        return 1.0

    def count_units(self, body: Any, workers: int) -> int | None:
        """How many such units a worker has in a step at most; None: as many as the data say."""
        return None

    def step_tokens(self, scenario: Any, body: Any, size: Any) -> float:
        """Positions of one global step, at most."""
        raise NotImplementedError

    def derive_sizes(
        self, body: Any, workers: Mapping[str, int], chunks: Mapping[str, int]
    ) -> dict[str, Any]:
        """Sizes a worker and chunk, as a plan prints them; `workers` and `chunks` by role."""
        return {}

    def work(self, scenario: Any, name: str, body: Any, groups: tuple[PlannedGroup, ...], size: Any) -> Any:
        """Flops and bytes of a step (a plan's `StageWork`)."""
        raise NotImplementedError

    def compute_lengths(self, body: Any, users: int, events: int) -> dict[str, Any]:
        """Arguments of StageSetup that follow from the data: at least `steps` and `users` (a step)."""
        raise NotImplementedError


STAGES = PluginRegistry("stage", StageKind, "nonet.controller.stages")


def stage_of(value: Any, info: ValidationInfo) -> Any:
    """A stage from plain keys, by its kind. Raises ConfigError and pydantic's errors."""
    if isinstance(value, StageOptions):
        return value
    return kind_of(value, files_of(info)).options.model_validate(value, context=info.context)


def kind_of(value: Any, files: PluginFiles = HERE) -> StageKind:
    """The kind of a stage's keys: what `use` names, else the first shipped one that claims them."""
    document = value if is_map(value) else {}
    if "use" in document:
        return STAGES.get(document["use"], files)
    shipped = [STAGES.get(name) for name in STAGES.list_shipped()]
    return next((kind for kind in shipped if kind.can_claim(set(document))), STAGES.get("supervised"))
