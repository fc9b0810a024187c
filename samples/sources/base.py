"""The interface of sources of training samples: facts for planning, and a function that opens the source on a rank.

    open(request, options) -> Samples

A source that needs none of the run's prepared events does not open them, so no trainer loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import PluginRegistry, load_heavy
from nonet.replaceable import Replaceable
from nonet.suggest import join_names, suggest_sentence

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from nonet.samples.ledger import SampleLedger
    from nonet.samples.sequences import Sequences
    from nonet.samples.stores import StoreJoins

Options = Mapping[str, Any]


def _keep_row_count(options: Options, rows: int) -> int | None:
    return rows


def _keep_options(options: Options) -> Options:
    return options


def _ignore_end(options: Options, end: int | None) -> Options:
    return options


def _skip_check(options: Options) -> None:
    pass


def _explain_nothing(options: Options, seed: int, engine: str | None) -> list[str]:
    return ["the source determines its rows and their order"]


@dataclass(frozen=True)
class SampleSource:
    """A kind of source of samples.

    Attributes:
        open: (request, options) -> Samples, or the dotted path of that function.
        options: The source's keys in a scenario.
        epoch: (options, rows) -> rows of an epoch, given those of the prepared sequences; None for an endless stream.
        engines: Allowed values of `data.engine`: "local" in the trainer's process, "ray" on Ray Data.
        targets: Whether stages may have a `target:` with it.
        pin: options -> the options that a run keeps from its start on, such as the files that a pattern matches then.
        weights: Whether samples have kinds and columns of events, which a stage's `weight:` and `propensity:` read.
        until: (options, unix seconds from which on data.split holds events out, or None) -> options of a run.
        check: Raises an error before a run starts if files cannot be read with the options that `until` returns.
        explain: (options, seed, engine) -> lines that describe the rows and their order, or the dotted path of that
            function.
    """

    open: str | Callable[..., Samples]
    options: type[StrictModel] = StrictModel
    epoch: Callable[[Options, int], int | None] = _keep_row_count
    engines: tuple[str, ...] = ("local",)
    targets: bool = True
    weights: bool = True
    pin: Callable[[Options], Options] = _keep_options
    until: Callable[[Options, int | None], Options] = _ignore_end
    check: Callable[[Options], None] = _skip_check
    explain: str | Callable[[Options, int, str | None], list[str]] = _explain_nothing


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The input of a source: the stage, the rows of a step, and the prepared data.

    Attributes:
        stage: Name of the stage; random draws depend on it, on the seed and on the step.
        seed: Seed of the stage.
        unit: "users" for windows of their events, or "events" for rows of a click model.
        rows: Rows of a global step over all ranks.
        history: Most events of a user in a sample.
        target: Name of the stage's condition among the targets of the sequences; None for all events.
        chunk: Most positions of one batch; a step's share is cut into as many batches as needed.
        features: Sparse features that the model reads.
        events: Opens the run's prepared sequences.
        items: Opens the run's item table in the order of the dense index.
        sids_IL: Semantic ids [I, L] int32; None for a model that has none.
        joins: Columns that events get from stores; None for none.
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


class Samples(Protocol):
    """An opened source on one rank."""

    @property
    def schema(self) -> Mapping[str, str]:
        """Sparse feature -> meaning of its ids, such as {"item": "int64 an event", "user": "int64 a sequence"}."""
        ...

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], Any]]:
        """Return functions that make the batches, at least one, of a rank's share of a step of the stage (from 0).

        They return a `SampleBatch`, or a `ClickBatch` if the unit is events. A batch may be empty, is made on demand, and
        may be made twice. Steps are requested in order, each once, from where `restore` continues.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return plain data (JSON) to continue after the last requested step; {} if the step number is sufficient."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


@runtime_checkable
class CountedSource(Protocol):
    """A source that counts its rows.

    `batch` leases the rows of a step for all ranks, and the reader calls `ledger.apply_step` after the optimizer step. The
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
    """Open the source that `config["use"]` names. Raises ConfigError if it lacks a feature that the model reads."""
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
