"""What a scenario says of its data and how items are tokenised: one class a key, every key with its unit."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from nonet.controller.scenario.replaceable import Replaceable
from nonet.errors import ConfigError
from nonet.options import Count, Positive, Rate, StrictModel, Word
from nonet.plugins import Registry
from nonet.samples.sources import SOURCES
from nonet.samples.stores import check_address
from nonet.units import Seconds


class Keep(StrictModel):
    item_events: Annotated[
        Count, Field(description="items with fewer events are dropped, with their events")
    ] = 0
    user_events: Annotated[Count, Field(description="users with fewer events are dropped")] = 0


class LeaveLastOut(StrictModel):
    test: Positive = 1
    valid: Count = 1
    rl: Count = 0


class TimeSplit(StrictModel):
    test: str
    valid: Seconds | None = None
    rl: Seconds | None = None


class Split(Replaceable):
    default: ClassVar[str] = "leave_last_out"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {"leave_last_out": LeaveLastOut, "time": TimeSplit}


class Compress(StrictModel):
    """Repeated events of a user with one item within a period as one event (`nonet.samples.sequences.compress`)."""

    compress: Annotated[Seconds, Field(ge=1, description="the period, of the clock: 1d is a day of UTC")]
    by: Annotated[
        Literal["item", "category"],
        Field(description="what is put together: events with one item, or with items of the same categories"),
    ] = "item"


class Labels(StrictModel):
    """What happened later to events, such as purchases after clicks (`nonet.samples.sequences.labelled`)."""

    path: Annotated[
        str, Field(description="a table of user_id, item_id and timestamp, named as in the interactions")
    ]
    within: Annotated[Seconds, Field(ge=1, description="how long after its event a label counts")]
    name: Annotated[
        Word,
        Field(description="the column that events get: 1, 0, or not known where the window is not over"),
    ] = "label"


def _check_address(use: str) -> None:
    try:
        check_address(use)
    except ConfigError as error:
        raise ValueError(str(error)) from None


class StoredIn(StrictModel):
    """A store that the tokenise stage writes users' sequences into, and that is read from by key (`nonet.samples.tokenised`)."""

    use: Annotated[
        str,
        Field(
            description="a folder, lmdb:FOLDER or redis://HOST:PORT/NAME; the data's hash is added to it; passwords come from "
            "the environment"
        ),
    ]
    options: Annotated[dict[str, Any], Field(description="of the store, see docs/stores.md")] = {}

    @field_validator("use")
    @classmethod
    def _can_be_written(cls, use: str) -> str:
        _check_address(use)
        if use.startswith("hbase:"):
            raise ValueError(
                "tables of HBase are made in its shell; use a folder, lmdb:FOLDER or redis://HOST:PORT/NAME"
            )
        return use


class Join(StrictModel):
    """Columns of a store that samples and rollouts get as they are read (`nonet.samples.stores`)."""

    use: Annotated[
        str,
        Field(
            description="a folder of packed segments, lmdb:FOLDER, redis://HOST:PORT/NAME or hbase://HOST:PORT/TABLE; passwords "
            "come from the environment"
        ),
    ]
    columns: Annotated[
        list[str] | dict[str, str],
        Field(
            min_length=1,
            description="names, or name here -> name in the store; of HBase name -> family:qualifier type",
        ),
    ]
    on: Annotated[
        Literal["item", "user"] | None,
        Field(description="what the store's keys are the ids of; by default what the join is called"),
    ] = None
    as_of: Annotated[
        Literal["time", "newest"] | None,
        Field(
            description="time: the newest version before the event; newest: as it is now. By default time where the store has "
            "versions"
        ),
    ] = None
    options: Annotated[
        dict[str, Any], Field(description="of the store: timeout, attempts, and what docs/stores.md lists")
    ] = {}

    @field_validator("use")
    @classmethod
    def _without_password(cls, use: str) -> str:
        _check_address(use)
        return use


_BATCH_COLUMNS = ("item", "user", "time", "event", "sid", "target", "uid")


class Source(Replaceable):
    default: ClassVar[str] = "shuffled"
    registry: ClassVar[Registry[Any] | None] = SOURCES


class Data(StrictModel):
    interactions: str
    items: str | None = None
    columns: dict[str, str] = {}
    keep: Keep = Keep()
    where: str | None = None
    events: Compress | None = None
    labels: Annotated[
        Labels | None,
        Field(description="labels that come later than their events, as a column of the events"),
    ] = None
    join: dict[Word, Join] = {}
    sequences: Annotated[
        StoredIn | None,
        Field(
            description="a store of users' tokenised events, read by key; by default they stay in the run's folder"
        ),
    ] = None
    prepare: Annotated[
        Literal["memory", "disk"] | None,
        Field(
            description="where events become sequences: memory, or disk, in memory that does not grow with them; the same "
            "sequences either way. By default disk above five million events"
        ),
    ] = None
    history: Annotated[Positive, Field(description="last events of a user that the model sees")] = 50
    split: Split = Split()
    source: Annotated[Source, Field(description="where trainers' samples come from")] = Source()
    engine: Annotated[
        Literal["local", "ray"] | None,
        Field(
            description="local, threads of the trainers; ray, Ray Data; by default ray for sources that it can read "
            "above 64 GiB"
        ),
    ] = None
    repeats: Annotated[
        Literal["allow", "mask"] | None,
        Field(
            description="whether items that a user has seen may be recommended again; mask: to nobody, and held-out events "
            "that return to one are missed by all. By default allow where more than 1 % of the events but the test's return"
        ),
    ] = None

    @model_validator(mode="after")
    def _joins_meet(self) -> Data:
        taken: dict[str, str] = {}
        for name, join in self.join.items():
            if join.on is None and name not in ("item", "user"):
                raise ValueError(f"join.{name}: say on: item or on: user, or call the join item or user")
            for column in join.columns:
                if column in _BATCH_COLUMNS:
                    raise ValueError(
                        f"join.{name}.columns: {column!r} is a name of every sample; give it another: {{mine: {column}}}"
                    )
                if column in taken:
                    raise ValueError(
                        f"join.{name}.columns: {column!r} comes from join.{taken[column]} too; rename one: {{mine: {column}}}"
                    )
                taken[column] = name
        return self

    @model_validator(mode="after")
    def _engine_of_source(self) -> Data:
        engines = self.source.spec.engines
        if self.engine is not None and self.engine not in engines:
            raise ValueError(
                f"engine: {self.engine} does not read the source {self.source.use!r}; {', '.join(engines)} does"
            )
        return self


# --- tokenizer, model -------------------------------------------------------------------------------------


class TextEncoder(StrictModel):
    """Vectors of what items say, by a transformers model on this machine (`nonet.models.hf`)."""

    use: Literal["hf"]
    path: Annotated[str, Field(description="a folder with config.json, safetensors and a tokenizer")]
    columns: Annotated[list[str], Field(min_length=1, description="of the items, text or lists of it")] = [
        "title"
    ]
    pool: Annotated[
        Literal["mean", "last", "first"], Field(description="of a text's states: their mean, or one of them")
    ] = "mean"
    weight: Rate = 1.0


class RqKmeans(StrictModel):
    vectors: list[str | dict[str, float] | TextEncoder] | str | dict[str, float] | TextEncoder = [
        "title",
        "categories",
        "cooccurrence",
    ]
    levels: Annotated[int, Field(ge=1, le=8)] = 3
    codes: Annotated[int, Field(ge=2, le=65536)] = 64
    dim: Positive = 64


class FileTokenizer(StrictModel):
    path: str


class Tokenizer(Replaceable):
    default: ClassVar[str] = "rq_kmeans"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {"rq_kmeans": RqKmeans, "file": FileTokenizer}
