"""Supervised stages (pretrain, finetune): trainers learn to predict the next events of histories; no rollout takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nonet.controller.scenario import BatchSize, StageKind, StageOptions, StepWork, Stop
from nonet.errors import ConfigError
from nonet.options import Positive, Rate, Share, StrictModel, Word
from nonet.suggest import join_names, suggest_sentence

if TYPE_CHECKING:
    from nonet.controller.scenario import Scenario
    from nonet.models import ModelSize
    from nonet.samples.sequences import Sequences

# Steps that trainers run in one call of the controller; a call per step would slow down steps of 20 ms.
CHUNK_STEPS = 10
_TRAINED = 6.0  # FLOPs per parameter and position of a training step: two forward, four backward


class Propensity(StrictModel):
    """The column that holds the probability with which the item of an event was shown."""

    column: Word
    most: Annotated[
        Rate,
        Field(
            description="the largest weight of a target, so that rarely shown items do not dominate a step"
        ),
    ] = 10.0


class Task(StrictModel):
    """A further label that a click model predicts for an event."""

    target: Annotated[
        str,
        Field(
            description="the condition that an event fulfils if it has the label; one that lacks a column on which the condition "
            "depends has no label, and teaches the task nothing"
        ),
    ]
    weight: Annotated[Rate, Field(description="the weight of the task's loss; that of the target is 1")] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _parse_condition(cls, value: Any) -> Any:
        """Return the options of a task that is given by its condition alone."""
        return {"target": value} if isinstance(value, str) else value


class Supervised(StageOptions):
    """The keys of a supervised stage."""

    kind_name: ClassVar[str] = "supervised"
    epochs: Positive | None = None
    tokens: Rate | None = None
    steps: Positive | None = None
    batch: BatchSize = BatchSize(users=8)
    target: str | None = None
    tasks: Annotated[
        dict[Word, Task],
        Field(
            description="further labels that a click model predicts besides the target, as conditions by name, or {target: "
            "condition, weight: number}"
        ),
    ] = {}
    stop: Annotated[
        Stop | Literal["off"] | None,
        Field(
            description=f"when the stage stops early: {{patience: {Stop().patience}}} by default, or off; its learning rate "
            "follows the schedule of the full length"
        ),
    ] = None
    ahead: Annotated[
        Positive | None,
        Field(
            description="how many events ahead each state predicts; a target at a distance d has the weight 1 / d; by default "
            "3, or 1 for models in which codes are tokens"
        ),
    ] = None
    smoothing: Annotated[
        Share,
        Field(description="label smoothing: the share of a target that the valid sibling codes receive"),
    ] = 0.0
    weight: Annotated[
        dict[str, Rate],
        Field(
            description="the weight of a target by its kind of event, e.g. {buy: 5}; kinds left out have weight 1. Weights are "
            "scaled to a mean of 1, so that the learning rate need not change"
        ),
    ] = {}

    propensity: Annotated[
        Propensity | None,
        Field(
            description="a column of the interactions with the probability that the event's item was shown. A target is weighted "
            "by its inverse, at most `most`"
        ),
    ] = None

    @model_validator(mode="after")
    def _check_length(self) -> Supervised:
        if [self.epochs, self.tokens, self.steps].count(None) != 2:
            raise ValueError("give one of epochs, tokens and steps")
        return self


class SupervisedKind(StageKind):
    """The kind of supervised stages, measured in epochs, tokens or steps."""

    options: ClassVar[type[StageOptions]] = Supervised
    loop: ClassVar[str] = "nonet.controller.stages._loops:run_supervised"
    validates: ClassVar[bool] = True

    def can_claim(self, keys: set[str]) -> bool:
        """Return whether a stage with these keys and no `use` is a supervised stage."""
        return "rewards" not in keys and ("steps" not in keys or bool(keys & _SUPERVISED_KEYS))

    def find_least_users(self, stage_options: Supervised) -> tuple[int | None, str]:
        """Return the number of users of a step, None if a step is measured in tokens, and the key that sets it."""
        return stage_options.batch.users, "batch.users"

    def count_step_tokens(self, scenario: Scenario, stage_options: Supervised, size: ModelSize) -> float:
        """Return the largest number of positions of a step over all workers: its tokens, or one full history per user."""
        history_positions = size.count_history_positions(scenario.data.history)
        return stage_options.batch.tokens or (stage_options.batch.users or 1) * history_positions

    def check_data(self, name: str, stage_options: Supervised, seq: Sequences) -> None:
        """Raise ConfigError if the data lack a kind of event that has a weight, or valid propensities."""
        for kind in stage_options.weight:
            if kind not in seq.event_names:
                known = (
                    f"its kinds are {join_names(seq.event_names)}" if seq.event_names else "it has no kinds"
                )
                raise ConfigError(
                    f"stages.{name}.weight: the data has no event {kind!r}; {known}.{suggest_sentence(kind, seq.event_names)}"
                )

        if stage_options.propensity is not None:
            _check_propensity(f"stages.{name}.propensity", stage_options.propensity.column, seq)

    def derive_sizes(
        self, stage_options: Supervised, workers: Mapping[str, int], chunks: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the length of the stage and the sizes of its steps, by the description that a plan prints."""
        batch, trainers = stage_options.batch, workers["trainer"]
        lengths = {
            "epochs": stage_options.epochs,
            "tokens": int(stage_options.tokens or 0),
            "steps": stage_options.steps,
        }
        sizes: dict[str, Any] = {unit: length for unit, length in lengths.items() if length}
        chunk_size = {"tokens a chunk": chunks["trainer"]} if chunks.get("trainer") else {}
        if batch.users:
            return (
                sizes
                | {"users a step": batch.users, "users a trainer": -(-batch.users // trainers)}
                | chunk_size
            )
        if stage_options.tokens and batch.tokens:
            sizes["steps"] = -(-int(stage_options.tokens) // int(batch.tokens))
        tokens = int(batch.tokens or 0)
        return sizes | {"tokens a step": tokens, "tokens a trainer": -(-tokens // trainers)} | chunk_size

    def estimate_work(self, scenario: Scenario, stage_options: Supervised, size: ModelSize) -> StepWork:
        """Return an upper bound of the FLOPs and rows of a step."""
        tokens = self.count_step_tokens(scenario, stage_options, size)
        steps = stage_options.steps or 0
        if stage_options.tokens and stage_options.batch.tokens:
            steps = -(-int(stage_options.tokens) // int(stage_options.batch.tokens))
        flops = {"trainer": _TRAINED * size.parameters * tokens}
        return StepWork(steps, flops, tokens / size.positions_an_event, row_directions=2)

    def compute_lengths(self, stage_options: Supervised, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of StageSetup that depend on the numbers of users and events in the data."""
        users_per_step = min(
            users,
            stage_options.batch.users
            or max(1, round((stage_options.batch.tokens or 1) * users / max(1, events))),
        )
        steps_per_epoch = -(-users // users_per_step)
        steps_for_tokens = max(1, round((stage_options.tokens or 1) / max(1, events) * steps_per_epoch))
        steps = stage_options.steps or (
            stage_options.epochs * steps_per_epoch if stage_options.epochs else steps_for_tokens
        )
        return {
            "steps": steps,
            "users": users_per_step,
            "ahead": stage_options.ahead,
            "smoothing": stage_options.smoothing,
            "weight": dict(stage_options.weight),
            "tasks": {name: task.weight for name, task in stage_options.tasks.items()},
            "propensity": stage_options.propensity.model_dump() if stage_options.propensity else {},
        }


# Keys that only supervised stages have. `steps` is left out, because RL stages have it too.
_SUPERVISED_KEYS = set(Supervised.model_fields) - set(StageOptions.model_fields) - {"steps"}

SPEC = SupervisedKind()


def _check_propensity(path: str, column: str, seq: Sequences) -> None:
    """Raise ConfigError if the propensity column is missing or has values that are not probabilities."""
    if column not in seq.columns:
        known_columns = f"it carries {join_names(seq.columns)}" if seq.columns else "it carries no columns"
        raise ConfigError(
            f"{path}.column: the data has no {column!r}; {known_columns}.{suggest_sentence(column, seq.columns)}"
        )
    for part in seq.iterate_parts():
        values = part.columns[column]
        if values.dtype.kind != "f" or bool(((values <= 0) | (values > 1)).any()):
            raise ConfigError(
                f"{path}.column: {column!r} must hold probabilities above 0 and up to 1, or null; "
                "leave out unknown probabilities, or give them as null"
            )
