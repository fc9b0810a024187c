"""Supervised stages (pretrain, finetune): trainers learn the next events of histories; rollouts rest."""

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

# A call per chunk of steps, not per step, keeps the controller out of a 20 ms step's way.
CHUNK_STEPS = 10
_TRAINED = 6.0  # flops a parameter and position: two forward, four backward
_TARGETED = 0.5  # share of events that a `target:` condition keeps, where the data has not said


class Propensity(StrictModel):
    """The column with the probability that the item of an event was shown."""

    column: Word
    most: Annotated[Rate, Field(description="the largest inverse, so that rare ones do not rule a step")] = (
        10.0
    )


class Supervised(StageOptions):
    """The keys of a supervised stage."""

    kind_name: ClassVar[str] = "supervised"
    epochs: Positive | None = None
    tokens: Rate | None = None
    steps: Positive | None = None
    batch: BatchSize = BatchSize(users=8)
    target: str | None = None
    stop: Annotated[
        Stop | Literal["off"] | None,
        Field(
            description="when the stage stops early: {patience: 3} by default, or off; its learning rate goes on as if it ran "
            "to its end"
        ),
    ] = None
    ahead: Annotated[
        Positive | None,
        Field(
            description="events this far ahead are targets too, weighted 1 / distance; by default what suits the model: 3, "
            "1 where codes are tokens"
        ),
    ] = None
    smoothing: Annotated[
        Share, Field(description="of a target, given to the legal siblings of its codes: label smoothing")
    ] = 0.0
    weight: Annotated[
        dict[str, Rate],
        Field(
            description="what a target counts by its kind of event, e.g. {buy: 5}; kinds left out count 1. On average a "
            "target counts 1, so rates stay right"
        ),
    ] = {}

    propensity: Annotated[
        Propensity | None,
        Field(
            description="a column of the interactions: how likely the event's item was to be shown. Targets count its inverse, "
            "at most `most`"
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
        """Return whether a stage with these keys and no `use` is supervised."""
        return "rewards" not in keys and ("steps" not in keys or bool(keys & _OWN))

    def find_least_users(self, stage_options: Supervised) -> tuple[int | None, str]:
        """Return the users of a step and the key that sets them."""
        return stage_options.batch.users, "batch.users"

    def count_step_tokens(self, scenario: Scenario, stage_options: Supervised, size: ModelSize) -> float:
        """Return the largest number of positions of a global step: full histories, or the tokens that the stage sets."""
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
        """Return the sizes of a worker and chunk that a plan prints."""
        batch, trainers = stage_options.batch, workers["trainer"]
        lengths = {
            "epochs": stage_options.epochs,
            "tokens": int(stage_options.tokens or 0),
            "steps": stage_options.steps,
        }
        sizes: dict[str, Any] = {what: length for what, length in lengths.items() if length}
        cut = {"tokens a chunk": chunks["trainer"]} if chunks.get("trainer") else {}
        if batch.users:
            return sizes | {"users a step": batch.users, "users a trainer": -(-batch.users // trainers)} | cut
        if stage_options.tokens and batch.tokens:
            sizes["steps"] = -(-int(stage_options.tokens) // int(batch.tokens))
        tokens = int(batch.tokens or 0)
        return sizes | {"tokens a step": tokens, "tokens a trainer": -(-tokens // trainers)} | cut

    def estimate_work(self, scenario: Scenario, stage_options: Supervised, size: ModelSize) -> StepWork:
        """Estimate the work of a step."""
        tokens = self.count_step_tokens(scenario, stage_options, size)
        steps = stage_options.steps or 0
        if stage_options.tokens and stage_options.batch.tokens:
            steps = -(-int(stage_options.tokens) // int(stage_options.batch.tokens))
        flops = {"trainer": _TRAINED * size.parameters * tokens}
        return StepWork(steps, flops, tokens / size.positions_an_event, row_directions=2)

    def compute_lengths(self, stage_options: Supervised, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of StageSetup that follow from the data."""
        per_step = min(
            users,
            stage_options.batch.users
            or max(1, round((stage_options.batch.tokens or 1) * users / max(1, events))),
        )
        per_epoch = -(-users // per_step)
        by_tokens = max(1, round((stage_options.tokens or 1) / max(1, events) * per_epoch))
        steps = stage_options.steps or (
            stage_options.epochs * per_epoch if stage_options.epochs else by_tokens
        )
        return {
            "steps": steps,
            "users": per_step,
            "ahead": stage_options.ahead,
            "smoothing": stage_options.smoothing,
            "weight": dict(stage_options.weight),
            "propensity": stage_options.propensity.model_dump() if stage_options.propensity else {},
        }


# Keys that only this kind has; `steps` alone says nothing.
_OWN = set(Supervised.model_fields) - set(StageOptions.model_fields) - {"steps"}

SPEC = SupervisedKind()


def _check_propensity(path: str, column: str, seq: Sequences) -> None:
    """Raise ConfigError if the propensity column is missing or has values that are not probabilities."""
    if column not in seq.columns:
        known = f"it carries {join_names(seq.columns)}" if seq.columns else "it carries no columns"
        raise ConfigError(
            f"{path}.column: the data has no {column!r}; {known}.{suggest_sentence(column, seq.columns)}"
        )
    for part in seq.iterate_parts():
        values = part.columns[column]
        if values.dtype.kind != "f" or bool(((values <= 0) | (values > 1)).any()):
            raise ConfigError(
                f"{path}.column: {column!r} must hold chances above 0 and up to 1, or nothing; "
                "leave out, or give as null, what is not known"
            )
