"""The sections `data` and `init` of a scenario. Other sections are in the folders that use them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from nonet.options import Positive, StrictModel, Word
from nonet.samples.sequences import Compress, Keep, Labels, Split
from nonet.samples.sources import Source
from nonet.samples.stores import Join
from nonet.samples.tables import TableFormat
from nonet.samples.tokenised import StoredSequences

# Columns that every sample has, so that no joined column may have their names.
_BATCH_COLUMNS = ("item", "user", "time", "event", "sid", "target", "uid")


class Data(StrictModel):
    """The section `data`: the tables of a scenario, and how they become sequences."""

    interactions: str
    items: str | None = None
    columns: dict[str, str] = {}
    missing: Annotated[
        list[str] | None,
        Field(
            description="texts that mean a missing value, which is no id of a user or item and no category. By default NA, "
            "N/A, n/a, nan, NaN, None, null, NULL, \\N, <NA> and the empty text"
        ),
    ] = None
    keep: Keep = Keep()
    where: str | None = None
    events: Compress | None = None
    labels: Annotated[
        Labels | None,
        Field(description="labels that arrive later than their events, added as a column of the events"),
    ] = None
    join: dict[Word, Join] = {}
    sequences: Annotated[
        StoredSequences | None,
        Field(
            description="a store of users' tokenised events, read by key; by default they are kept in the run's folder"
        ),
    ] = None
    prepare: Annotated[
        Literal["memory", "disk"] | None,
        Field(
            description="where events are turned into sequences: in memory, or on disk with bounded memory; the sequences are "
            "the same. By default disk above five million events"
        ),
    ] = None
    history: Annotated[
        Positive, Field(description="the number of a user's last events that the model sees")
    ] = 50
    split: Split = Split()
    source: Annotated[Source, Field(description="the source of the trainers' samples")] = Source()
    engine: Annotated[
        Literal["local", "ray"] | None,
        Field(
            description="local: threads of the trainers; ray: Ray Data. By default ray for sources above 64 GiB that it can "
            "read"
        ),
    ] = None
    repeats: Annotated[
        Literal["allow", "mask"] | None,
        Field(
            description="whether items that a user has seen may be recommended again; mask: to nobody, and held-out events "
            "that return to one are missed by all. By default allow where more than 1 % of the events but the test's return"
        ),
    ] = None

    @field_validator("missing")
    @classmethod
    def _check_missing(cls, missing: list[str] | None) -> list[str] | None:
        """Reject texts that are listed twice."""
        repeated = [text for text in dict.fromkeys(missing or ()) if (missing or []).count(text) > 1]
        if repeated:
            raise ValueError(f"{repeated[0]!r} is listed more than once; list each text once")
        return missing

    @property
    def table_format(self) -> TableFormat:
        """The column names of the tables, and the texts that mean a missing value."""
        return TableFormat.from_options(self.columns, self.missing)

    @model_validator(mode="after")
    def _check_joins(self) -> Data:
        """Check that joined columns have unique names that differ from those of samples."""
        join_by_column: dict[str, str] = {}
        for name, join in self.join.items():
            if join.on is None and name not in ("item", "user"):
                raise ValueError(f"join.{name}: set on: item or on: user, or name the join item or user")
            for column in join.columns:
                if column in _BATCH_COLUMNS:
                    raise ValueError(
                        f"join.{name}.columns: {column!r} is a name of every sample; give it another: {{mine: {column}}}"
                    )
                if column in join_by_column:
                    raise ValueError(
                        f"join.{name}.columns: {column!r} comes from join.{join_by_column[column]} too; "
                        f"rename one: {{mine: {column}}}"
                    )
                join_by_column[column] = name
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Data:
        """Check that the source supports the engine."""
        engines = self.source.spec.engines
        if self.engine is not None and self.engine not in engines:
            raise ValueError(
                f"engine: {self.engine} does not read the source {self.source.use!r}; {', '.join(engines)} does"
            )
        return self


class Init(StrictModel):
    """The section `init`: the run and stage from which a run takes its first weights."""

    source: Annotated[
        str,
        Field(alias="from", description="the run to start from: a folder, an id, a unique prefix, or last"),
    ]
    stage: Annotated[str | None, Field(description="one of its finished stages; by default the last")] = None
