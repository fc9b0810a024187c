"""SampleSource: where trainers' samples come from; facts that a plan reads, and the function that opens it on a rank.

    open(request, options) -> Samples

A source that needs none of the run's prepared events never asks the request for them, and then no trainer loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import PluginRegistry, load_heavy
from nonet.suggest import join_names, suggest_sentence

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from nonet.samples.ledger import Ledger
    from nonet.samples.sequences import Sequences
    from nonet.samples.stores import Joins

Options = Mapping[str, Any]


def _all_of_them(options: Options, rows: int) -> int | None:
    return rows


def _as_they_are(options: Options) -> Options:
    return options


def _without_end(options: Options, end: int | None) -> Options:
    return options


def _nothing_to_check(options: Options) -> None:
    pass


def _not_told(options: Options, seed: int, engine: str | None) -> list[str]:
    return ["its rows and their order are its own"]


@dataclass(frozen=True)
class SampleSource:
    """One source.

    open     (request, options) -> Samples, or the dotted path of that function
    options  its keys in a scenario
    epoch    (options, rows) -> rows of an epoch, given how many the prepared sequences have; None for a stream without an end
    engines  what may read it, `data.engine`: "local", in the trainer's process, "ray", on Ray Data
    targets  whether stages may have a `target:` with it
    pin      options -> those that a run keeps to from its start on, e.g. the files that a pattern matches then
    weights  whether its samples carry kinds and columns of events, which a stage's `weight:` and `propensity:` read
    until    (options, unix seconds from which on data.split holds events out, or None) -> options of a run
    check    refuses, before a run starts, files that cannot be read as its options say; gets what `until` returns
    explain  (options, seed, engine) -> lines that say what is read in which order, or the dotted path of that function
    """

    open: str | Callable[..., Samples]
    options: type[StrictModel] = StrictModel
    epoch: Callable[[Options, int], int | None] = _all_of_them
    engines: tuple[str, ...] = ("local",)
    targets: bool = True
    weights: bool = True
    pin: Callable[[Options], Options] = _as_they_are
    until: Callable[[Options, int | None], Options] = _without_end
    check: Callable[[Options], None] = _nothing_to_check
    explain: str | Callable[[Options, int, str | None], list[str]] = _not_told


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What a stage asks of its source.

    stage, seed  name and seed: what a source draws, it draws from them and the step
    unit         what a step's rows are: "users", for windows of their events, or "events", for rows of a click model
    rows         of a global step, over all ranks
    history      events of a user that a sample holds at most
    target       name of the stage's condition among the targets of the sequences; None for all events
    chunk        positions of one batch at most; a step's share is cut into as many batches as that takes
    features     sparse features that the model reads
    events       opens the run's prepared sequences
    items        opens its item table, a row an item in the order of the dense index
    sids_IL      semantic ids [I, L] int32; None for a model that has none
    joins        what the events of the sequences get out of stores; None for nothing
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
    joins: Joins | None = None


class Samples(Protocol):
    """An opened source on one rank."""

    @property
    def schema(self) -> Mapping[str, str]:
        """Sparse feature -> what its ids are of, e.g. {"item": "int64 an event", "user": "int64 a sequence"}."""
        ...

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], Any]]:
        """A rank's share of a step of the stage (from 0), as functions that make its batches, at least one.

        They are `SampleBatch`, or where the unit is events one `ClickBatch`. A batch may be empty, is made when it is needed,
        and may be made twice. Steps are asked for in order, each once, from where `restore` left off.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Plain data (JSON) to go on from after the last step asked for; {} where the step alone says it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...


@runtime_checkable
class Counted(Protocol):
    """A source that counts its rows: `batch` leases those of a step, for all ranks, and its reader calls `ledger.apply_step`
    after the optimizer step. Its ledger is saved in commits."""

    @property
    def ledger(self) -> Ledger: ...


SOURCES = PluginRegistry("source", SampleSource, "nonet.samples.sources")


def open_source(config: Options, request: SampleRequest) -> Samples:
    """The source that `config["use"]` names, opened. Raises ConfigError where it lacks a feature that the model reads."""
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
