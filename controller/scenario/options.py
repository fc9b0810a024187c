"""Options of a scenario: one class per key, with units (`nonet.options` describes options in general)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from nonet.controller.cluster.placement import PLACEMENTS
from nonet.controller.scenario.replaceable import Replaceable, get_files
from nonet.deadlines import DEFAULTS
from nonet.errors import ConfigError
from nonet.models import MODELS
from nonet.models.baselines import BASELINES
from nonet.models.tokenizer.kinds import TOKENIZERS
from nonet.options import Positive, StrictModel, Word
from nonet.plugins import HERE, LocatedName, PluginFiles, PluginRegistry, parse_file
from nonet.samples.sequences import Compress, Keep, Labels, LeaveLastOut, TimeSplit
from nonet.samples.sources import SOURCES
from nonet.samples.stores import check_address
from nonet.samples.tables import TableFormat
from nonet.samples.tokenised import StoredIn
from nonet.suggest import suggest_inline
from nonet.units import Bytes, Seconds
from nonet.workers.engines import ENGINES
from nonet.workers.roles.kinds import ROLES, RoleKind

# --- data ---------------------------------------------------------------------------------------------------------


class Split(Replaceable):
    """The split of events into training, validation, test and RL events."""

    default: ClassVar[str] = "leave_last_out"
    shipped: ClassVar[dict[str, type[StrictModel]]] = {"leave_last_out": LeaveLastOut, "time": TimeSplit}


def _check_address(use: str) -> None:
    """Raise ValueError if the address of a store is invalid or contains a password."""
    try:
        check_address(use)
    except ConfigError as error:
        raise ValueError(str(error)) from None


class Join(StrictModel):
    """Columns of a store that are added to samples and rollouts as they are read (`nonet.samples.stores`)."""

    use: Annotated[
        str,
        Field(
            description="a folder of packed segments, lmdb:FOLDER, redis://HOST:PORT/NAME or hbase://HOST:PORT/TABLE; passwords "
            "are read from the environment"
        ),
    ]
    columns: Annotated[
        list[str] | dict[str, str],
        Field(
            min_length=1,
            description="names, or a mapping from names to those in the store; for HBase to `family:qualifier type`",
        ),
    ]
    on: Annotated[
        Literal["item", "user"] | None,
        Field(description="which ids are the keys of the store; by default the name of the join"),
    ] = None
    as_of: Annotated[
        Literal["time", "newest"] | None,
        Field(
            description="time: the newest version before the event; newest: the current version. By default time if the store "
            "has versions"
        ),
    ] = None
    options: Annotated[
        dict[str, Any],
        Field(
            description="options of the store: timeout, attempts, and those that docs/how-to/stores.md lists"
        ),
    ] = {}

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str) -> str:
        _check_address(use)
        return use


_BATCH_COLUMNS = ("item", "user", "time", "event", "sid", "target", "uid")


class Source(Replaceable):
    """The source of the trainers' samples."""

    default: ClassVar[str] = "shuffled"
    registry: ClassVar[PluginRegistry[Any] | None] = SOURCES


class Data(StrictModel):
    """The tables of a scenario, and how they become sequences."""

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
        StoredIn | None,
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
        twice = [text for text in dict.fromkeys(missing or ()) if (missing or []).count(text) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} is listed more than once; list each text once")
        return missing

    @property
    def table_format(self) -> TableFormat:
        """Column names, and the texts that mean a missing value."""
        return TableFormat.from_options(self.columns, self.missing)

    @model_validator(mode="after")
    def _check_joins(self) -> Data:
        """Check that joined columns have unique names that differ from those of samples."""
        taken: dict[str, str] = {}
        for name, join in self.join.items():
            if join.on is None and name not in ("item", "user"):
                raise ValueError(f"join.{name}: set on: item or on: user, or name the join item or user")
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
    def _check_engine(self) -> Data:
        """Check that the engine can read the source."""
        engines = self.source.spec.engines
        if self.engine is not None and self.engine not in engines:
            raise ValueError(
                f"engine: {self.engine} does not read the source {self.source.use!r}; {', '.join(engines)} does"
            )
        return self


# --- tokenizer, model -------------------------------------------------------------------------------------


class Tokenizer(Replaceable):
    """The tokenizer that gives items their semantic ids."""

    default: ClassVar[str] = "rq_kmeans"
    registry: ClassVar[PluginRegistry[Any] | None] = TOKENIZERS


class Memory(StrictModel):
    """A memory of items that voters vote for, mixed with the model's scores (`nonet.models.generation.memory`)."""

    voters: Annotated[
        list[Literal["transitions", "nearest"]],
        Field(
            description="transitions: items that follow a user's events; nearest: items whose rows are nearest to the "
            "user's state"
        ),
    ] = ["transitions"]
    width: Annotated[
        Positive,
        Field(description="the number of items with most votes that a user's memory keeps per voter"),
    ] = 64
    last: Annotated[Positive, Field(description="the number of a user's newest events that vote")] = 5
    fade: Annotated[
        float,
        Field(gt=0, le=1, description="decay: the vote of an event relative to that of the next newer one"),
    ] = 0.6
    reach: Annotated[
        Positive,
        Field(description="the largest distance between a pair of events; a pair weighs 1 / distance"),
    ] = 3
    neighbours: Annotated[
        Positive, Field(description="the number of most frequent transitions that are kept per item")
    ] = 100
    events: Annotated[
        list[str], Field(description="kinds of events that are counted and that vote; all by default")
    ] = []
    half_life: Annotated[
        Seconds | None, Field(gt=0, description="age at which a pair has half its weight")
    ] = None

    @field_validator("voters")
    @classmethod
    def _check_voters(cls, voters: list[str]) -> list[str]:
        """Check that transitions are among the voters, and that no voter is listed twice."""
        if "transitions" not in voters or len(set(voters)) < len(voters):
            raise ValueError("voters must be transitions, or transitions and nearest, each once")
        return voters


class Model(Replaceable):
    """The model and its memory of transitions."""

    default: ClassVar[str] = "sid_decoder"
    registry: ClassVar[PluginRegistry[Any] | None] = MODELS
    memory: Annotated[
        Literal["on", "off"] | Memory,
        Field(
            description="a memory of transitions over the catalogue, whose weight is fitted to validation after every "
            "supervised stage"
        ),
    ] = "off"

    def make_count_options(self) -> dict[str, Any]:
        """Return the options by which transitions are counted."""
        memory = self._get_memory() or Memory()
        counted = {"reach", "neighbours", "events"}
        return {**memory.model_dump(include=counted), "half_life_s": memory.half_life}

    def make_vote_options(self) -> dict[str, Any] | None:
        """Return the options by which the memory votes; None without a memory."""
        memory = self._get_memory()
        return memory and {
            **memory.model_dump(include={"width", "last", "fade"}),
            "nearest": "nearest" in memory.voters,
        }

    def list_voters(self) -> list[str]:
        """Return the names of the memory's voters; none without a memory."""
        memory = self._get_memory()
        return list(memory.voters) if memory else []

    def _get_memory(self) -> Memory | None:
        """Return the options of the memory; None if it is off."""
        if isinstance(self.memory, str):
            return Memory() if self.memory == "on" else None
        return self.memory


# --- pools and roles ----------------------------------------------------------------------------------------------


class Env(StrictModel):
    """The Python environment of a pool's workers."""

    python: str | None = None
    image: str | None = None
    pip: list[str] | None = None
    vars: dict[str, str] = {}

    @model_validator(mode="after")
    def _check_one_source(self) -> Env:
        """Check that at most one of python, image and pip is given."""
        keys = [name for name in ("python", "image", "pip") if getattr(self, name)]
        if len(keys) > 1:
            raise ValueError(f"give one of python, image and pip, got {' and '.join(keys)}")
        return self


class Pool(StrictModel):
    """A set of devices that roles use, with labels and an environment."""

    device: Annotated[str, Field(pattern=r"^[a-z]+$")] = "cpu"
    labels: dict[str, str] = {}
    env: Env | None = None
    memory: Annotated[
        Bytes | None,
        Field(
            gt=0,
            description="bytes of one device, or on cpu of one bundle, for models, optimizers and activations; "
            "groups that do not fit together take turns. By default what the cluster view states",
        ),
    ] = None


class Elastic(StrictModel):
    """A number of workers between two bounds."""

    min: Positive
    max: Positive

    @model_validator(mode="after")
    def _check_order(self) -> Elastic:
        """Check that the lower bound does not exceed the upper one."""
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


Level = Literal["device_domain", "host", "rack", "zone"]


class Topology(StrictModel):
    """Topology levels that a role's workers must or should share."""

    require: list[Level] = []
    prefer: list[Level] = []


class Placement(Replaceable):
    """The policy that chooses nodes for the workers of a group."""

    default: ClassVar[str] = "best_fit"
    registry: ClassVar[PluginRegistry[Any] | None] = PLACEMENTS


class Engine(Replaceable):
    """The engine that steps the trainers' dense weights."""

    default: ClassVar[str] = "ddp"
    registry: ClassVar[PluginRegistry[Any] | None] = ENGINES


class Role(StrictModel):
    """The placement of a role's workers; for a role of the user's own also its kind and that kind's options."""

    model_config = ConfigDict(extra="allow")
    use: Annotated[str | None, Field(description="the kind of role, unless its name is that of a kind")] = (
        None
    )
    pool: str | None = None
    workers: Positive | Elastic = 1
    topology: Topology = Topology()
    engine: Engine | None = None
    fuse: str | None = None
    collocate: str | None = None

    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="after")
    def _check_own_options(self, info: ValidationInfo) -> Role:
        """Validate the options of a role that names its kind; reject unknown keys of other roles."""
        self._files = get_files(info)
        own = self.model_extra or {}
        if self.use is None:
            if own:
                known = [name for name in type(self).model_fields if name != "use"]
                key = next(iter(own))
                raise ValueError(
                    f"{key}: unknown key{suggest_inline(key, known)}; known keys: {', '.join(sorted(known))}"
                )
            return self
        filled = self.find_kind("").options.model_validate(own).model_dump()
        object.__setattr__(self, "__pydantic_extra__", filled)
        return self

    def find_kind(self, name: str) -> RoleKind:
        """Return the kind of a role.

        Args:
            name: The name of the role in the scenario.

        Returns:
            The kind that `use` names, else the shipped kind of that name, else an empty kind that can only be planned.
        """
        if self.use is None and name not in ROLES.list_shipped():
            return RoleKind("")
        return ROLES.get(self.use or name, self._files)

    @property
    def own_options(self) -> dict[str, Any]:
        """Keyword arguments of the class of its workers."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _check_sharing(self) -> Role:
        """Check that the role does not both fuse and collocate."""
        if self.fuse and self.collocate:
            raise ValueError(
                "has both fuse and collocate; fuse shares the process, collocate only the device: choose one"
            )
        return self


class Init(StrictModel):
    """The run and stage from which a run takes its first weights."""

    source: Annotated[
        str,
        Field(alias="from", description="the run to start from: a folder, an id, a unique prefix, or last"),
    ]
    stage: Annotated[str | None, Field(description="one of its finished stages; by default the last")] = None


class BaselineOptions(Replaceable):
    """A baseline that stages are compared with."""

    registry: ClassVar[PluginRegistry[Any] | None] = BASELINES
    name: Annotated[
        Word | None, Field(description="the name in the report; by default the last word of `use`")
    ] = None

    @property
    def title(self) -> str:
        """The name in results, such as "sasrec", or "Nearest" for mine.py:Nearest."""
        return self.name or str(self.use).rpartition(":")[2]


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

    @field_validator("metrics")
    @classmethod
    def _locate_metrics(cls, metrics: list[str], info: ValidationInfo) -> list[str]:
        """Store the absolute path of each metric in a user's file next to its name."""
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
        titles = [each.title for each in self.baselines or ()]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice:
            raise ValueError(
                f"baselines: {titles.count(twice)} are named {twice!r}; give each a different name:"
            )
        return self


Wait = Annotated[Seconds, Field(gt=0)]


class DeadlineOptions(StrictModel):
    """Timeouts of a run's waits, in seconds."""

    start: Annotated[
        Wait, Field(description="the start of a group's processes, including their environment")
    ] = float(DEFAULTS.start)
    step: Annotated[
        Wait, Field(description="a training step or a rollout; ranks wait twice as long for each other")
    ] = float(DEFAULTS.step)
    open: Annotated[
        Wait, Field(description="the opening of the artifacts, or of a checkpoint, in every role")
    ] = float(DEFAULTS.open)
    save: Annotated[Wait, Field(description="the writing of a checkpoint")] = float(DEFAULTS.save)
    tokenise: Annotated[Wait, Field(description="the reading and tokenising of the tables")] = float(
        DEFAULTS.tokenise
    )
    evaluate: Annotated[Wait, Field(description="the ranking of one stage or baseline")] = float(
        DEFAULTS.evaluate
    )
    reshard: Annotated[Wait, Field(description="the moving of all tables' rows")] = float(DEFAULTS.reshard)


class Weights(StrictModel):
    """How dense weights are sent to rollouts and written into checkpoints."""

    publish: Annotated[
        Literal["full", "delta"],
        Field(
            description="what is sent to rollouts in other processes: all weights, or only the blocks that changed"
        ),
    ] = "full"
    bucket: Annotated[Bytes, Field(ge=4096, description="weights that are sent to rollouts at once")] = (
        64 << 20
    )
    block: Annotated[Bytes, Field(ge=64, description="the size of the blocks of a delta")] = 65536
    shard: Annotated[
        Bytes, Field(ge=4096, description="the size of one weights or optimizer file of a checkpoint")
    ] = 2 << 30
