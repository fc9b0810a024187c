"""The sections `data` and `init` of a scenario, and the options of rewards and of steps between rollout and rewards.

Other options are in the folders that use them.
"""

from __future__ import annotations

from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from nonet.errors import ConfigError
from nonet.options import Count, Positive, Rate, Share, StrictModel, Word
from nonet.samples.batches.graphs import Graph
from nonet.samples.sequences import COUNT, KINDS, SPAN, Compress, Keep, Labels, Split
from nonet.samples.sources import Source
from nonet.samples.stores import Join
from nonet.samples.tables import ROLES, TableFormat
from nonet.samples.tokenised import VECTOR_FILES, StoredSequences
from nonet.storage import check_address
from nonet.suggest import join_names
from nonet.yaml import is_map

# Columns that every sample has, so that no joined column may have their names.
_BATCH_COLUMNS = ("item", "user", "time", "event", "sid", "target", "uid")
_TOLERANCE = 0.02  # share of a floor by which a mean may be below the floor, as means vary from step to step


class StorageOptions(StrictModel):
    """The section `storage`: where the run's files are kept, instead of a folder that all nodes share."""

    url: Annotated[str, Field(description="s3://bucket or s3://bucket/folder; runs are folders below it")]
    single_writer: Annotated[
        bool,
        Field(
            description="allow a store without conditional writes; then nothing prevents two processes from writing one run"
        ),
    ] = False

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        """Check that the address is one of object storage."""
        try:
            return check_address(url)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("storage is ")) from None


def parse_storage(value: Any) -> Any:
    """Return the options of a storage that is given by its address alone."""
    return {"url": value} if isinstance(value, str) else value


def _wrap_labels(value: Any) -> Any:
    """Return the options of several labels, of which one may be given without a list."""
    if value is None:
        return []
    return [value] if is_map(value) else value


_OWN_ITEM_COLUMNS = ("item", "item_id", "title", "categories", "events", "cooccurrence")
"""Names of columns of every item table, and of a source of vectors, which `data.vectors` must not take."""


class Data(StrictModel):
    """The section `data`: the tables of a scenario, and how they become sequences."""

    interactions: str
    items: str | None = None
    vectors: Annotated[
        dict[Word, str],
        Field(
            description="files of item vectors, .npy or .parquet, by the name of the column of the items that they become: "
            "an embedding of texts or images that the semantic ids, the memory's signals and rewards can use"
        ),
    ] = {}
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
    unknown_items: Annotated[
        Literal["refuse", "drop"],
        Field(
            description="interactions, and events of data.source, whose item data.items lacks: an error, or left out and counted "
            "(drop)"
        ),
    ] = "refuse"
    events: Compress | None = None
    labels: Annotated[
        list[Labels],
        BeforeValidator(_wrap_labels, json_schema_input_type=Labels | list[Labels] | None),
        Field(
            description="labels that arrive later than their events, added as columns of the events: one, or a list"
        ),
    ] = []
    join: dict[Word, Join] = {}
    graph: Annotated[
        dict[Word, Graph],
        Field(
            description="graphs of users and items, whose neighbours as of a row's time are features of a click model"
        ),
    ] = {}
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
    cache: Annotated[
        str,
        Field(
            description="where sequences, semantic ids and the memory's counts are kept for later runs on the same data: "
            "node, the cache of the node ($NONET_CACHE); a folder, such as /shared/cache; or none"
        ),
    ] = "node"
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

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: list[Labels]) -> list[Labels]:
        """Reject labels that have the same name, or one that conditions cannot name or that other columns have."""
        names = [options.name for options in labels]
        reserved = {*_BATCH_COLUMNS, *ROLES, *ROLES.values(), COUNT, SPAN, KINDS, "true", "false"}
        for name in names:
            if name.lower() in reserved or iskeyword(name) or not name.isidentifier():
                raise ValueError(
                    f"a label cannot have the name {name!r}; give it another of letters, digits and _, such as bought, but no "
                    f"word of conditions, and none of {join_names(sorted(reserved))}"
                )
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two labels have the name {repeated[0]!r}; give each a name of its own")
        return labels

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

    @field_validator("cache")
    @classmethod
    def _check_cache(cls, cache: str) -> str:
        """Reject an address, and a word that is neither `node` nor `none`, which would be the name of a new folder."""
        if cache not in ("node", "none") and ("/" not in cache or "://" in cache):
            raise ValueError(
                f"{cache!r} is neither node nor none, nor a folder such as /shared/cache or ./cache"
            )
        return cache

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
    def _check_unknown_items(self) -> Data:
        """Check that there is an items table if items may be unknown."""
        if self.unknown_items == "drop" and self.items is None:
            raise ValueError(
                "unknown_items: drop needs the items table (data.items) that says which items are known"
            )
        return self

    @model_validator(mode="after")
    def _check_vectors(self) -> Data:
        """Check that the vectors are of an items table and in files of the two kinds."""
        for name, path in self.vectors.items():
            if self.items is None:
                raise ValueError(
                    f"vectors.{name}: these are columns of the items table, so name it in data.items"
                )
            if name in _OWN_ITEM_COLUMNS:
                raise ValueError(f"vectors.{name}: this name has a meaning of its own; choose another one")
            # A URI may end in options of the file system.
            if not (path.partition("?")[0] if "://" in path else path).endswith(VECTOR_FILES):
                raise ValueError(f"vectors.{name}: {path} must be a .npy or a .parquet file")
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
    train: Annotated[
        Literal["all", "new"],
        Field(
            description="the training events: all, or new: those that the run to start from, and those before it, have not "
            "trained on. With new, `last` is the newest finished run of the same name, and the dense optimizer continues"
        ),
    ] = "all"
    replay: Annotated[
        Share | None,
        Field(description="with train: new, the share of events that were trained on before; by default 0.2"),
    ] = None
    rate: Annotated[
        Share | None,
        Field(
            description="with train: new, the constant learning rate as a share of the stage's peak; by default 0.1"
        ),
    ] = None

    @model_validator(mode="after")
    def _check_train(self) -> Init:
        """Check that options of continued runs are only given to them."""
        given = [name for name in ("replay", "rate") if getattr(self, name) is not None]
        if given and self.train == "all":
            raise ValueError(
                f"{given[0]}: only runs with train: new have it; add train: new, or leave it out"
            )
        return self


class Ramp(StrictModel):
    """A weight that stays at `start`, then changes linearly to `end` and stays there."""

    start: float
    end: float
    steps: Annotated[Positive, Field(description="steps of the stage from start to end")]
    after: Annotated[Count, Field(description="steps before the weight begins to change")] = 0

    def compute_weight(self, step: int) -> float:
        """Return the weight at a step of the stage, counted from 0."""
        progress = min(1.0, max(0.0, (step - self.after) / self.steps))
        return self.start + progress * (self.end - self.start)


class RewardOptions(BaseModel):
    """The options of one reward; keys that are no fields here are the keyword arguments of the reward itself."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
    use: Any = None
    weight: Annotated[
        float | Ramp, Field(description="the weight in the sum of rewards, or {start, end, steps, after}")
    ] = 1.0
    at_least: Annotated[
        float | None,
        Field(
            description="a floor of its mean per beam; while the mean is lower, a multiplier adds to its weight"
        ),
    ] = None
    timeout_s: Rate = 60.0
    pool: str | None = None
    workers: Positive = 1

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the reward itself."""
        return dict(self.model_extra or {})

    def compute_weight(self, step: int) -> float:
        """Return the reward's weight at a step of its stage, without the multiplier of a floor."""
        return self.weight.compute_weight(step) if isinstance(self.weight, Ramp) else self.weight


def is_above_floor(mean: float, floor: float) -> bool:
    """Return whether a mean reward meets a floor, or misses it by at most 2 % of the floor."""
    return mean >= floor - _TOLERANCE * abs(floor)


class BetweenStep(BaseModel):
    """The options of a step between rollout and rewards, which the user's own workers run.

    Keys that are no fields here are the keyword arguments of the worker.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    use: Any
    pool: str | None = None
    workers: Positive = 1

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the worker."""
        return dict(self.model_extra or {})


def resolve_stores(document: dict[str, Any], folder: Path) -> None:
    """Make the addresses of local stores that start at the folder of a scenario absolute.

    A joined store that is not in this folder keeps its address, which then starts at the current folder.

    Args:
        document: The scenario's document, which is changed.
        folder: The folder of the scenario.
    """
    data = document.get("data")
    if not is_map(data) or (folder / "sources.json").exists():  # as a run stores it
        return
    joins = data.get("join")
    for join in joins.values() if is_map(joins) else ():
        _resolve_address(join, folder, must_exist=True)
    _resolve_address(data.get("sequences"), folder, must_exist=False)


def _resolve_address(options: Any, folder: Path, *, must_exist: bool) -> None:
    """Make the relative `use` of a local store absolute, if the folder has the store or it need not exist."""
    if not is_map(options):
        return
    use = options.get("use")
    if not isinstance(use, str) or "://" in use:
        return
    prefix, location = ("lmdb:", use.removeprefix("lmdb:")) if use.startswith("lmdb:") else ("", use)
    if ":" not in location and ((folder / location).is_dir() or not must_exist):
        options["use"] = f"{prefix}{(folder / location).absolute()}"
