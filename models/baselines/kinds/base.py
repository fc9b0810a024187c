"""Baseline: the interface of baselines that stages are compared with.

    class Nearest:                                      # evaluate.baselines: [{use: "mine.py:Nearest", neighbours: 50}]
        def __init__(self, n_items, *, seed, neighbours: int = 20): ...
        def fit(self, seq, splits=(TRAIN,)): ...        # returns self
        def scores(self, seq, users, positions): ...    # float32 [P, n_items], higher is better

Keyword arguments of the constructor are keys in the scenario. `seed` and `history` are the run's, for a constructor that names
them; `transitions` and `item_table` are functions that return the run's counts of transitions and its item table. If its scores
differ between prompts in few items, a baseline may have `votes(seq, users, positions)` -> SparseVotes, which is ranked without
[P, I]. It may describe its training in `trained`: {"epochs": 12, "seconds": 80.5, "loss": "...", ...}. If that takes minutes, it
may also have `fit_in_parts(seq)`, a generator: between its parts the evaluator answers other calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self

from pydantic import Field, create_model

from nonet.errors import ConfigError
from nonet.options import StrictModel, Word
from nonet.plugins import PluginRegistry, load_heavy
from nonet.replaceable import Replaceable

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from nonet.samples.sequences import Sequences, Transitions

# Shapes: P prompts, I items.

# Arguments that the run passes to constructors that declare them.
_RUN_ARGUMENTS = ("seed", "history", "transitions", "item_table")


@dataclass(frozen=True, slots=True)
class SparseVotes:
    """Scores that differ from shared ones only for C (prompt, item) pairs, the cells.

    Attributes:
        prior: Scores [I] that all prompts share.
        prompt: Prompt of each cell [C].
        item: Item of each cell [C], in the order of prompt and item.
        weight: Value [C] that is added to the prior in each cell.
    """

    prior: np.ndarray
    prompt: np.ndarray
    item: np.ndarray
    weight: np.ndarray


class Baseline(Protocol):
    """Interface of a baseline, which is constructed with (n_items, **options)."""

    def fit(self, seq: Sequences) -> Self:
        """Fit to the events of the train split only, and return the baseline itself."""
        ...

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores of all items for prompts, [P, I] float32 or float64; higher is better, -inf is never recommended.

        A prompt consists of a user's events before a position. The caller masks the items that the user has seen.

        Args:
            seq: The sequences.
            users: Users [P] of the prompts.
            positions: Positions [P] in the users' histories.
        """
        ...


@dataclass(frozen=True)
class BaselineSpec:
    """A kind of baseline.

    Attributes:
        build: Its class, or the dotted path of the class.
        options: Its keys in a scenario.
        quick: Whether fitting takes at most two seconds, so that `nonet recommend` can fit it again.
        check_items: Function (item table, options) that raises an error if the items do not fit the options. For data of which a
            plan reads a sample, the table has the types of the items, and nulls for rows if their number is known.
    """

    build: str | Callable[..., Baseline]
    options: type[StrictModel] = StrictModel
    quick: bool = False
    check_items: Callable[[pa.Table, Mapping[str, Any]], None] = lambda items, options: None


class _BaselineRegistry(PluginRegistry[BaselineSpec]):
    """Registry that also accepts a class with `fit` and `scores` as a spec."""

    def _check(self, value: Any, title: str) -> BaselineSpec:
        if isinstance(value, type):
            value = BaselineSpec(value, _derive_options(value))
        return super()._check(value, title)


BASELINES = _BaselineRegistry(
    "baseline",
    BaselineSpec,
    "nonet.models.baselines.kinds",
    contract={"build": Baseline},
    page="docs/how-to/baselines.md",
)


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


def require_implicit(items: pa.Table, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the library implicit is not installed; the arguments are those of `BaselineSpec.check_items`."""
    if find_spec("implicit") is None:
        raise ConfigError(
            f"evaluate.baselines: {options['use']} needs implicit: pip install 'nonet[baselines]'"
        )


def make_baseline(
    config: Mapping[str, Any],
    n_items: int,
    *,
    seed: int,
    history: int,
    transitions: Callable[[], Transitions] | None = None,
    item_table: Callable[[], pa.Table] | None = None,
) -> Baseline:
    """Create the baseline that `config["use"]` names, with the other keys as its options.

    Args:
        config: `use` and the options of the baseline.
        n_items: Number of items.
        seed: Seed of the run.
        history: Maximum number of events of a history.
        transitions: Returns the transitions that the run has counted.
        item_table: Returns the item table.

    Raises:
        ConfigError: The baseline cannot be created with these options.
    """
    options = dict(config)
    use = options.pop("use")
    baseline_class = load_heavy(BASELINES.get(use).build)
    parameters = inspect.signature(baseline_class).parameters
    run_arguments = zip(_RUN_ARGUMENTS, (seed, history, transitions, item_table), strict=True)
    accepted = {key: value for key, value in run_arguments if key in parameters}
    try:
        return baseline_class(n_items, **accepted, **options)
    except Exception as error:
        raise ConfigError(
            f"baseline {use!r}: {baseline_class.__name__}() failed: {type(error).__name__}: {error}"
        ) from error


def _derive_options(cls: type) -> type[StrictModel]:
    """Create an options model from the constructor arguments of a class, except the first and those that the run passes."""
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(cls).parameters.values())[1:]:
        is_keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_keyword and parameter.name not in _RUN_ARGUMENTS:
            fields[parameter.name] = (
                Any,
                ... if parameter.default is parameter.empty else parameter.default,
            )
    return create_model(f"{cls.__name__}Options", __base__=StrictModel, **fields)
