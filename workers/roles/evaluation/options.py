"""Options of evaluations: metrics, users and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from nonet.models.baselines.kinds import BaselineOptions
from nonet.options import Positive, StrictModel
from nonet.plugins import LocatedName, parse_file
from nonet.replaceable import get_files

_EXHAUSTIVE_ITEMS = 25_000  # Exhaustive scores of a larger catalogue take seconds per prompt.


class Evaluate(StrictModel):
    """Metrics, users and baselines of evaluations."""

    metrics: Annotated[list[str], Field(min_length=1)] = ["recall@5", "recall@10", "ndcg@5", "ndcg@10"]
    width: Annotated[int, Field(ge=1)] = 20
    users: Annotated[
        Positive | Literal["all"],
        Field(
            description="the number of users whose held-out events are ranked, drawn by the seed if there are more; with 20,000 "
            "users, a recall of 0.1 is known to 0.004"
        ),
    ] = 20_000
    exhaustive: Annotated[
        Literal["on", "off"] | None,
        Field(
            description="whether a model scores every item; off: beam search only. By default on for up to 25,000 items"
        ),
    ] = None
    every: Annotated[
        Positive | None,
        Field(
            description="steps between validations of a supervised stage, whose end is validated too. By default once per "
            "epoch, but 4 to 20 times per stage and at least 50 steps apart; on up to 2,000 validation users"
        ),
    ] = None
    baselines: Annotated[
        list[BaselineOptions] | None,
        Field(
            description="baselines that stages are compared with: popularity, transition_counter, sasrec, or a class of your "
            "own; by default the model's"
        ),
    ] = None

    shuffle_ties: Annotated[
        bool,
        Field(
            description="rank test events once more with a user's events of equal time in a random order, drawn by the seed; "
            "training does not change"
        ),
    ] = False

    @property
    def most_users(self) -> int | None:
        """The largest number of users that are ranked; None for all."""
        return None if self.users == "all" else int(self.users)

    def is_exhaustive(self, items: int) -> bool:
        """Return whether models score every item of a catalogue of this size; otherwise they are ranked by beam alone."""
        return items <= _EXHAUSTIVE_ITEMS if self.exhaustive is None else self.exhaustive == "on"

    def make_baseline_configs(self, defaults: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return `use` and options of each baseline by its name in the report, as `make_baseline` takes them.

        Args:
            defaults: The baselines if none are chosen.
        """
        if self.baselines is None:
            return {name: {"use": name} for name in defaults}
        return {each.title: {"use": each.address, **each.get_options()} for each in self.baselines}

    def locate_baselines(self) -> Evaluate:
        """Return the same options with absolute paths of the user's own baselines, for other processes."""
        located = [each.model_copy(update={"use": each.address}) for each in self.baselines or ()]
        return self.model_copy(update={"baselines": located}) if located else self

    @field_validator("metrics")
    @classmethod
    def _locate_metrics(cls, metrics: list[str], info: ValidationInfo) -> list[str]:
        """Attach the absolute path of the file to the name of each metric that is in a user's file."""
        return [
            LocatedName(name, get_files(info).make_absolute(name)) if parse_file(name) else name
            for name in map(str, metrics)
        ]

    @field_serializer("metrics")
    def _write_metrics(self, metrics: list[str]) -> list[str]:
        return [str(name) for name in metrics]

    @model_validator(mode="after")
    def _check_titles(self) -> Evaluate:
        """Check that baselines have different names."""
        titles = [baseline.title for baseline in self.baselines or ()]
        repeated = next((title for title in titles if titles.count(title) > 1), None)
        if repeated:
            raise ValueError(
                f"baselines: {titles.count(repeated)} are named {repeated!r}; give each a different name:"
            )
        return self
