"""The interface of sources of training samples.

A plug-in is a `SampleSource`: facts for planning, and a function `open(request, options) -> Samples` that opens the source on a
rank. A request has functions that open the run's prepared events and items, so a source that does not need them does not load
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import PluginRegistry, load_heavy
from nonet.replaceable import Replaceable
from nonet.suggest import join_names, suggest_sentence
from nonet.verbs import ALL_VERBS, SupportedVerbs

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from nonet.samples.ledger import SampleLedger
    from nonet.samples.sequences import Sequences, UnknownItems
    from nonet.samples.stores import StoreJoins

Options = Mapping[str, Any]


def _keep_row_count(options: Options, rows: int) -> int | None:
    return rows


def _keep_options(options: Options) -> Options:
    return options


def _ignore_end(options: Options, end: int | None) -> Options:
    return options


def _ignore_needs(options: Options, needs: EventNeeds) -> Options:
    return options


def _skip_check(options: Options) -> None:
    pass


def _explain_nothing(options: Options, seed: int, engine: str | None) -> list[str]:
    return ["the source determines its rows and their order"]


@dataclass(frozen=True, slots=True)
class EventNeeds:
    """What the stages of a run read of events besides their items, users and times.

    Attributes:
        targets: Condition on target events by stage.
        columns: Columns that features of the model and propensities read; "event", the kinds of events, if stages weight them.
        timed_joins: Names of the joins that read stores as of each event's time, or do if the store has versions.
        drops_unknown: Whether events are left out whose item the run does not have; otherwise they are an error.
    """

    targets: Mapping[str, str]
    columns: tuple[str, ...] = ()
    timed_joins: tuple[str, ...] = ()
    drops_unknown: bool = False


@dataclass(frozen=True)
class SampleSource:
    """A kind of source of samples (the plug-in).

    Attributes:
        open: Function (request, options) that opens the source and returns `Samples`, or its dotted path.
        options: The class of the source's options in a scenario.
        epoch: Function (options, rows) that returns the number of rows of an epoch, given that of the prepared sequences; it
            returns None for an endless stream.
        units: The units of samples that it gives, "users" or "events" (`SampleRequest.unit`).
        engines: Allowed values of `data.engine`: "local" reads in the trainer's process, "ray" on Ray Data.
        targets: Whether stages that use it may have a `target:`, and its events columns of stores (`data.join`).
        weights: Whether samples have types and columns of events, which a stage's `weight:` and `propensity:` read.
        pin: Function (options) that returns the options that a run keeps from its start on, such as the files that a pattern
            matches then.
        until: Function (options, end) that returns the options of a run; `end` is the unix seconds from which on data.split holds
            events out, or None.
        needs: Function (options, `EventNeeds`) that returns the options of a run, with what its stages read of events.
        count_unknown: Function (options, the ids of the run's items) that counts the events that are left out because the run
            does not have their item, or its dotted path; None for a source whose events are the run's own.
        check: Function (options) that raises an error before a run starts if files cannot be read with the options that `needs`
            and `until` return.
        explain: Function (options, seed, engine) that returns lines that describe the rows and their order, or its dotted path.
        verbs: The verbs that work for runs with the source.
        trains_new: Whether a continued run can train on new events only (`Sequences.new_targets`).
    """

    open: str | Callable[..., Samples]
    options: type[StrictModel] = StrictModel
    epoch: Callable[[Options, int], int | None] = _keep_row_count
    units: tuple[str, ...] = ("users", "events")
    engines: tuple[str, ...] = ("local",)
    targets: bool = True
    weights: bool = True
    pin: Callable[[Options], Options] = _keep_options
    until: Callable[[Options, int | None], Options] = _ignore_end
    needs: Callable[[Options, EventNeeds], Options] = _ignore_needs
    count_unknown: str | Callable[[Options, Any], UnknownItems] | None = None
    check: Callable[[Options], None] = _skip_check
    explain: str | Callable[[Options, int, str | None], list[str]] = _explain_nothing
    verbs: SupportedVerbs = ALL_VERBS
    trains_new: bool = False


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The input of a source: the stage, the rows of a step, and the prepared data.

    Attributes:
        stage: Name of the stage; random draws depend on it, on the seed and on the step.
        seed: Seed of the stage.
        unit: "users" for windows of their events, or "events" for rows of a click model.
        rows: Number of rows of a global step over all ranks.
        history: Maximum number of events of a user in a sample.
        target: Name of the stage's target (a mask of events) in the sequences; None to train on all events.
        chunk: Maximum number of model positions of one batch; a rank's share of a step is cut into as many batches as needed.
        features: Names of the sparse features that the model reads.
        events: Function that opens the run's prepared sequences.
        items: Function that opens the run's item table in the order of the dense index.
        sids_IL: Semantic ids of all items [I, L] int32; None for a model that has none.
        joins: The joins that add columns of stores to events; None for none.
        tasks: Weight of the loss of each task of a click model besides the stage's target.
    """

    stage: str
    seed: int
    unit: str
    rows: int
    history: int
    target: str | None
    chunk: int
    features: tuple[str, ...]
    events: Callable[[], Sequences]
    items: Callable[[], pa.Table]
    sids_IL: np.ndarray | None = None
    joins: StoreJoins | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)


class Samples(Protocol):
    """An opened source on one rank."""

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature, such as {"item": "int64 an event", "user": "int64 a sequence"}."""
        ...

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], Any]]:
        """Return functions that make the batches of a rank's share of a step.

        Steps are requested in order, each once, from where `restore` continues.

        Args:
            step: The global step of the stage, from 0.
            rank: The data-parallel rank.
            world: The number of data-parallel ranks.

        Returns:
            At least one function. It returns a `SampleBatch`, or a `ClickBatch` if the unit is events, which may be empty. It may
            be called later and more than once.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the state after the last requested step as plain data for JSON; {} if the step number is sufficient."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        ...


@runtime_checkable
class CountedSource(Protocol):
    """An opened source that records in a ledger which rows were used.

    Its `batch` leases the rows of a step for all ranks, and the trainer calls `ledger.apply_step` after the optimizer step. The
    ledger is saved in checkpoints.
    """

    @property
    def ledger(self) -> SampleLedger:
        """The ledger of the rows."""
        ...


SOURCES = PluginRegistry("source", SampleSource, "nonet.samples.sources", contract={"open": Samples})


class Source(Replaceable):
    """The source of the trainers' samples."""

    default: ClassVar[str] = "shuffled"
    registry: ClassVar[PluginRegistry[Any] | None] = SOURCES


def open_source(config: Options, request: SampleRequest) -> Samples:
    """Open a source.

    Args:
        config: The name of the source (`use`; by default "shuffled") and its options.
        request: The input of the source.

    Raises:
        ConfigError: If there is no such source, or it lacks a feature that the model reads.
    """
    options = dict(config)
    use = options.pop("use", "shuffled")
    samples = load_heavy(SOURCES.get(use).open)(request, options)
    for name in request.features:
        if name not in samples.schema:
            raise ConfigError(
                f"source {use!r} has no feature {name!r}; it has {join_names(samples.schema)}."
                f"{suggest_sentence(name, samples.schema)}"
            )
    return samples
