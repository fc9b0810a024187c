"""ModelSpec: the facts about a model that plans and runs need without torch.

A model is a folder `models/<name>/` with a `spec.py`. Sizes are exact where a test counts the real module's parameters;
otherwise they are estimates and marked as such.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nonet.options import Positive, StrictModel
from nonet.plugins import PluginRegistry, load_heavy
from nonet.replaceable import Replaceable
from nonet.units import Seconds
from nonet.verbs import ALL_VERBS, TRAINING_VERBS, SupportedVerbs

Options = Mapping[str, Any]

NATS = "nats"
"""Name of the metric that every validation computes: the mean negative log-likelihood of held-out events, in nats."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The data dimensions that a model is built for.

    Attributes:
        levels: Number of levels of the semantic ids.
        codes: Number of codes per level.
        history: Maximum number of events of a history.
        features: Row width of every sparse feature.
        tasks: Names of the tasks of a click model besides the target.
    """

    levels: int
    codes: int
    history: int
    features: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, from which a plan computes memory and operations.

    Attributes:
        parameters: Number of parameters.
        layers: Number of layers.
        width: Width of the states.
        feed_forward: Width of the feed-forward layers.
        kv_width: Width of the keys and values of a layer.
        vocabulary: Number of logits per position.
        levels: Number of levels of the semantic ids.
        positions_an_event: Number of positions per event.
        weight_bytes: Bytes per weight.
        assumed: Description of assumptions; "" if there are none.
        depth_vectors: Number of vectors of size `width` that each level of the depth decoder stores per position for the backward
            pass.
        frozen: Number of parameters that are not trained.
        matrices: Number of parameters between hidden states, of which Muon keeps one moment; 0 if unknown.
    """

    parameters: int
    layers: int
    width: int
    feed_forward: int
    kv_width: int
    vocabulary: int
    levels: int
    positions_an_event: int
    weight_bytes: int
    assumed: str = ""
    depth_vectors: int = 0
    frozen: int = 0
    matrices: int = 0

    def count_history_positions(self, events: int) -> float:
        """Return the number of positions of a history of `events` events, with the start position."""
        return float(events * self.positions_an_event + 1)

    @property
    def learned(self) -> int:
        """Number of parameters that are trained."""
        return self.parameters - self.frozen

    def estimate_activation_bytes(self, tokens: float, *, recompute: bool = False) -> float:
        """Estimate the bytes kept for the backward pass of `tokens` positions; attention keeps no score matrix.

        With `recompute`, a layer stores its input, and one layer at a time its other vectors.

        A layer stores about 10 vectors of size `width`, 2 of size `feed_forward` and 2 of size `kv_width`; the head stores its
        logits twice in fp32 (softmax and gradient, 8 bytes). `depth_vectors` are those that a level of the depth decoder adds.
        """
        layer = 10 * self.width + 2 * self.feed_forward + 2 * self.kv_width
        layers = layer + self.layers * self.width if recompute else self.layers * layer
        values_per_position = layers + self.levels * self.depth_vectors * self.width
        return tokens * (values_per_position * self.weight_bytes + 8 * self.vocabulary)

    def estimate_kv_bytes(self, tokens: float) -> float:
        """Return the bytes of the keys and values of `tokens` cached positions."""
        return tokens * self.layers * 2 * self.kv_width * self.weight_bytes


class ModelSpec:
    """A kind of model; by default one that recommends by semantic ids.

    Attributes:
        options: Class of its options, which are its keys in a scenario.
        build: Function (options, codes, features, seed) -> module, or its dotted path; `codes` is the number of codes per level,
            `features` the row width of each sparse feature.
        roles: Classes of the roles that train, evaluate and prepare data for it, or their dotted paths, by role; the shipped ones
            for all others.
        learner: Dotted path of the learner of stages whose kind names none; "" for the learner of users' histories.
        features: Sparse features that it reads; None for all that have a table.
        reads_graphs: Whether neighbours in the graphs of `data.graph` are features of it.
        has_tasks: Whether stages can have `tasks`, further labels that it predicts.
        makes_lists: Whether it recommends lists; then there are rollouts, RL, and a policy for repeats.
        rows: Unit of which a step's batch consists: "users" or "events".
        cuts_steps: Whether trainers divide a step into chunks that are computed one after another.
        optimizers: The optimizers of a stage that can step it, the default one first; () for those of the engine.
        blocks: Whether the module has `blocks`, which an engine may recompute or compile.
        ahead: Default number of future events that are targets.
        aligns: Whether stages can align semantic ids with words: the module has `compute_alignment_loss(sids, texts)`.
        exports: Function (module, options, seed, folder) that writes an additional export in the format of another library, or
            its dotted path; "" for none.
        imports: Function (config, codes, features, seed, folder) -> module that builds the module from what `exports` wrote, or
            its dotted path; `config` has `use` and `memory`. "" if an export also has the options and weights of the run.
        lower_is_better: Names of its metrics for which lower values are better.
        results: Dotted path of the class that reads what was predicted for the test events (`RankResults`).
        engine: Dotted path of the class that answers questions by a version, called with its dense weights, its other files by
            name, a reader of its rows, and its number; "" for `InferenceEngine`.
        version_files: Files of a checkpoint that a version has besides weights and rows, by name.
        export_folder: Dotted path of the function (`VersionToExport`, folder) that writes the folder of `nonet export`; "" for
            the folder that `Exported` loads.
        packages: The packages that an export of it needs besides nonet, as its example program names them.
        request_features: Dotted path of the class that makes questions from requests (`RequestFeatures`).
    """

    options: ClassVar[type[StrictModel]] = StrictModel
    build: ClassVar[Any] = ""
    roles: ClassVar[Mapping[str, Any]] = {}
    learner: ClassVar[str] = ""
    features: ClassVar[tuple[str, ...] | None] = None
    reads_graphs: ClassVar[bool] = False
    has_tasks: ClassVar[bool] = False
    makes_lists: ClassVar[bool] = True
    rows: ClassVar[str] = "users"
    cuts_steps: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ()
    blocks: ClassVar[bool] = True
    ahead: ClassVar[int] = 3
    aligns: ClassVar[bool] = False
    exports: ClassVar[Any] = ""
    imports: ClassVar[Any] = ""
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    results: ClassVar[str] = "nonet.models.ranking:RankResults"
    engine: ClassVar[str] = ""
    version_files: ClassVar[Mapping[str, str]] = {}
    export_folder: ClassVar[str] = ""
    packages: ClassVar[str] = "torch, pyarrow"
    request_features: ClassVar[str] = "nonet.deploy.opened:RequestFeatures"

    @property
    def verbs(self) -> SupportedVerbs:
        """The verbs that work for runs of the model; by default all if it makes lists, or those that train it."""
        return ALL_VERBS if self.makes_lists else SupportedVerbs(TRAINING_VERBS)

    @abstractmethod
    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Return the size of the model with these options for data of these dimensions."""
        raise NotImplementedError

    def make_build_options(self, options: Options, around: ModelContext) -> dict[str, Any]:
        """Return the options that are passed to `build`."""
        return dict(options)

    def hash_base(self, options: Options) -> str | None:
        """Return the SHA-256 of the folder of weights that the model is built on; None if it is not built on any.

        Raises:
            ConfigError: The folder does not exist.
        """
        return None

    def list_baselines(self, graphs: Collection[str] = ()) -> Sequence[str]:
        """Return the names of the baselines to compare with if `evaluate.baselines` is not set.

        Args:
            graphs: Names of the graphs of the scenario.
        """
        return ("popularity", "transition_counter", "attribute_counter")

    @staticmethod
    def list_tasks(scenario: Any) -> tuple[str, ...]:
        """Return the names of the tasks of the first stage, which are those of all stages; none if the model has no tasks."""
        return tuple(next((getattr(stage, "tasks", ()) for stage in scenario.stages.values()), ()))

    def is_lower_better(self, metric: str) -> bool:
        """Return whether lower values of a metric are better."""
        return metric in self.lower_is_better

    def check_metric(self, metric: str, width: int, tasks: Sequence[str] = ()) -> None:
        """Raise ConfigError for a metric that the model or its tasks do not have, or that looks beyond a beam of `width`."""
        from nonet.errors import ConfigError
        from nonet.models.ranking import parse_metric

        _, k = parse_metric(metric)
        if k and k > width:
            raise ConfigError(
                f"evaluate.width: a beam of {width} recommends {width} items, which {metric} looks beyond; "
                f"set evaluate.width to {k} or more, or ask for fewer items"
            )

    def find_tensor_limit(self, options: Options, ranks: int) -> str | None:
        """Return why a model with these options cannot be divided by tensor parallelism over so many ranks; None if it can."""
        return "this model (its blocks cannot be divided; leave tensor out)"

    def check(self, scenario: Any) -> None:
        """Raise ConfigError if a scenario asks for something that the model cannot do; no file may be read."""

    def list_packages(self, options: Options) -> Mapping[str, str]:
        """Return the packages that must be installed where the model is built, each with the extra that installs it."""
        return {}

    def check_files(self, scenario: Any) -> None:
        """Raise ConfigError if files of this machine that the options of the model name do not fit the scenario."""

    def check_columns(self, scenario: Any, log_columns: Sequence[str], items: Any) -> None:
        """Raise ConfigError if the model reads a column that the data lack.

        Args:
            scenario: The scenario.
            log_columns: Names of the columns of the interactions that sequences carry.
            items: Arrow schema of the items.
        """

    def check_events(self, scenario: Any, seq: Any) -> Sequence[str] | None:
        """Check that the model can be trained and tested on the events of the data, and return warnings, if there are any.

        Args:
            scenario: The scenario.
            seq: The prepared `Sequences`.

        Raises:
            DataError: It cannot.
        """

    def list_data_notes(self, scenario: Any, facts: Mapping[str, Any]) -> Sequence[str]:
        """Return sentences about the data of a run, from the facts that the model's tokenise role returned as "data"."""
        return ()


def _build_module(options: Any, codes: Any, features: Any, seed: Any) -> Any:
    """Signature of `ModelSpec.build`, which plug-ins are checked against."""


MODELS = PluginRegistry("model", ModelSpec, "nonet.models", "spec", contract={"build": _build_module})


def build_model(config: Options, codes: Sequence[int], features: Mapping[str, int], seed: int) -> Any:
    """Build the module that `config["use"]` names (default: sid_decoder), with weights drawn from `seed`.

    Args:
        config: `use` and the options of the model. If `memory`, the names of the memory's voters, is not empty, memory weights
            are attached to the module (`nonet.models.generation.memory`), and those of the signals that `memory_signals` names.
        codes: Number of codes of every level, including the collision level.
        features: Row width of each sparse feature.
        seed: Seed of the weights.

    Raises:
        ConfigError: The model is unknown or its options are invalid.
    """
    options = dict(config)
    memory, signals = options.pop("memory", None), options.pop("memory_signals", ())
    model = load_heavy(MODELS.get(options.pop("use", "sid_decoder")).build)(options, codes, features, seed)
    if memory:
        row_width = features["item"] if "nearest" in memory else None
        load_heavy("nonet.models.generation:attach")(model, seed, row_width, signals, "cold" in memory)
    return model


VALIDATION = "validation"  # in place of a memory's `decay`
_FADE = 0.6  # the default of a memory's `fade`
# The share of co-occurring items in the votes: chosen on validation (docs/benchmarks/quality.md, "What was tried").
_COOCCURRENCE_SHARE = 0.3


class Memory(StrictModel):
    """A memory of items that voters vote for, mixed with the model's scores (`nonet.models.generation.memory`)."""

    voters: Annotated[
        list[Literal["transitions", "cooccurrence", "nearest", "cold"]],
        Field(
            description="transitions: items that follow a user's events; cooccurrence: items that are often in the same "
            "histories; nearest: items whose rows are nearest to the user's state; cold: items without training events that are "
            "similar to the user's newest ones in `signals`"
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
    ] = _FADE
    decay: Annotated[
        Annotated[float, Field(gt=0)] | Literal["validation"] | None,
        Field(
            description="the k-th newest event votes with weight k^-decay, instead of `fade`; validation: the decay, and the "
            "share of cooccurrence, under whose votes validation events are most likely"
        ),
    ] = None
    reach: Annotated[
        Positive,
        Field(description="the largest distance between a pair of events; a pair weighs 1 / distance"),
    ] = 3
    reverse: Annotated[
        float,
        Field(ge=0, le=1, description="the weight of a pair whose items follow each other in reverse order"),
    ] = 0.0
    signals: Annotated[
        list[str],
        Field(
            description="columns of the items, text, lists of words or vectors, whose similarity with a user's newest events "
            "counts in the votes; the weight of each is fitted",
            validate_default=True,
        ),
    ] = []
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
            raise ValueError(
                "voters must be transitions, alone or with cooccurrence, nearest and cold, each once"
            )
        return voters

    @field_validator("decay")
    @classmethod
    def _check_decay(cls, decay: float | str | None, info: ValidationInfo) -> float | str | None:
        """Check that the weights of events are defined once."""
        if decay is not None and info.data.get("fade", _FADE) != _FADE:
            raise ValueError("fade and decay both weigh a user's newest events; give one of them")
        return decay

    @field_validator("signals", mode="before")
    @classmethod
    def _wrap_signal(cls, signals: Any) -> Any:
        """Return a list of the one signal that a word names."""
        return [signals] if isinstance(signals, str) else signals

    @field_validator("signals")
    @classmethod
    def _check_signals(cls, signals: list[str], info: ValidationInfo) -> list[str]:
        """Check that no signal is listed twice, and that there is one for cold items."""
        if "cold" in info.data.get("voters", ()) and not signals:
            raise ValueError("the voter cold needs signals, columns by which items are similar")
        if len(set(signals)) < len(signals):
            raise ValueError("name each signal once")
        if "cold items" in signals:
            raise ValueError(
                "a signal may not be called 'cold items', as a weight of the memory is; rename the column"
            )
        return signals


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

    @property
    def chooses_votes(self) -> bool:
        """Whether validation chooses options of the memory's votes."""
        memory = self._get_memory()
        return memory is not None and memory.decay == VALIDATION

    def make_count_options(self) -> dict[str, Any]:
        """Return the options of counting transitions: those of the memory, or its defaults if it is off."""
        memory = self._get_memory() or Memory()
        count_keys = {"reach", "neighbours", "events", *(["reverse"] if memory.reverse else ())}
        return {**memory.model_dump(include=count_keys), "half_life_s": memory.half_life}

    def make_vote_options(self) -> dict[str, Any] | None:
        """Return the options of the memory's votes (`VoteOptions`); None without a memory."""
        memory = self._get_memory()
        if memory is None:
            return None
        new_keys = [key for key in ("decay", "signals") if getattr(memory, key) not in (None, [], VALIDATION)]
        return {
            **memory.model_dump(include={"width", "last", "fade", *new_keys}),
            **({"cooccurrence": _COOCCURRENCE_SHARE} if "cooccurrence" in memory.voters else {}),
            "nearest": "nearest" in memory.voters,
            **({"cold": True} if "cold" in memory.voters else {}),
        }

    def list_voters(self) -> list[str]:
        """Return the names of the memory's voters; none without a memory."""
        memory = self._get_memory()
        return list(memory.voters) if memory else []

    def list_signals(self) -> list[str]:
        """Return the columns of items whose similarity counts in the memory's votes."""
        memory = self._get_memory()
        return list(memory.signals) if memory else []

    def _get_memory(self) -> Memory | None:
        """Return the options of the memory; None if it is off."""
        if isinstance(self.memory, str):
            return Memory() if self.memory == "on" else None
        return self.memory
