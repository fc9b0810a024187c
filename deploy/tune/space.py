"""A search space: the keys of a scenario that are searched, and the values that each may take.

    stages.pretrain.lr: {log: [1e-3, 1e-2]}            a number, sampled by its logarithm
    model.dropout: {range: [0.0, 0.5]}                 a number
    model.width: {int: [32, 128], step: 32}            a whole number
    model.block: [transformer, hstu]                   one of these
    metric: ndcg@10                                    the validation metric, by default the scenario's

Values are not checked against the scenario here, but when a scenario is loaded with them (deploy/tune/subject.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.errors import ConfigError
from nonet.suggest import suggest_sentence

METRIC = "metric"
KINDS = ("range", "log", "int")
MOST_CORNERS = 256  # each is loaded as a scenario before the search starts
_DIGITS = 4  # significant digits of sampled numbers
# Keys below `data` that decide which events are measured, and by which labels.
_DATA_KEYS = (
    "interactions",
    "labels",
    "columns",
    "missing",
    "events",
    "where",
    "keep",
    "repeats",
    "unknown_items",
    "split",
)
# Keys that define the task or the storage: scores of trials that differ in them cannot be compared.
_FIXED = (
    "name",
    "seed",
    "storage",
    "settings",
    "evaluate",
    "checkpoint",
    "deadlines",
    *(f"data.{key}" for key in _DATA_KEYS),
)
_EXAMPLES = "[a, b, c], {range: [low, high]}, {log: [low, high]} or {int: [low, high], step: n}"


@dataclass(frozen=True, slots=True)
class SearchKey:
    """One key of the search space.

    Attributes:
        path: The key's path in the scenario.
        kind: "choice", "range", "log" or "int".
        choices: The values of a choice.
        low: The lowest value of the other kinds.
        high: The highest value of the other kinds.
        step: The difference between neighbouring values; 0 if all numbers in the range are allowed.
    """

    path: str
    kind: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0

    def list_ends(self) -> tuple[Any, ...]:
        """Return the values to check a scenario with: every choice, or the lowest and the highest value."""
        return self.choices or (self.low, self.high)

    def round_value(self, value: float) -> Any:
        """Round a sampled number to four significant digits within the range, or convert it to a whole number."""
        if self.kind == "int":
            return int(value)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    def to_number(self, value: Any) -> float:
        """Return a value's position on an axis: a choice by its index, a log value by its logarithm."""
        if self.kind == "choice":
            return float(find_choice(self.choices, value))
        return math.log10(value) if self.kind == "log" else float(value)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """All keys that a search varies.

    Attributes:
        keys: The keys in the order of the file.
        metric: The metric that the file names; None for the scenario's own.
        source: The file, for errors.
    """

    keys: tuple[SearchKey, ...]
    metric: str | None
    source: str

    def iterate_listed(self) -> Iterator[dict[str, Any]]:
        """Yield values by key such that every end of every key occurs, with the first ends of the other keys."""
        ends_by_path = {key.path: key.list_ends() for key in self.keys}
        first_ends = {path: ends[0] for path, ends in ends_by_path.items()}
        yield first_ends
        for path, ends in ends_by_path.items():
            for end in ends[1:]:
                yield first_ends | {path: end}

    def iterate_corners(self) -> Iterator[dict[str, Any]]:
        """Yield values by key for all combinations of the keys' ends.

        With more than 256 combinations, yield those of every two keys, with the first end of all other keys.
        """
        ends_by_path = {key.path: key.list_ends() for key in self.keys}
        if math.prod(map(len, ends_by_path.values())) <= MOST_CORNERS:
            for values in itertools.product(*ends_by_path.values()):
                yield dict(zip(ends_by_path, values, strict=True))
            return
        first_ends = {path: ends[0] for path, ends in ends_by_path.items()}
        for path_a, path_b in itertools.combinations(ends_by_path, 2):
            for end_a, end_b in itertools.product(ends_by_path[path_a], ends_by_path[path_b]):
                yield first_ends | {path_a: end_a, path_b: end_b}


def find_choice(choices: tuple[Any, ...], value: Any) -> int:
    """Return the index of a value among choices of the same type, so that True differs from 1."""
    return next(
        index for index, choice in enumerate(choices) if type(choice) is type(value) and choice == value
    )


def read_space(path: Path) -> SearchSpace:
    """Read a search space from a file. Raises ConfigError, which names the key, its value and what is allowed."""
    document = yaml.read(path)
    if not yaml.is_map(document) or not set(document) - {METRIC}:
        raise ConfigError(
            f"{path}: must be keys of the scenario with their values, such as stages.pretrain.lr: {{log: [1e-3, 1e-2]}}"
        )
    metric = document.get(METRIC)
    if metric is not None and not isinstance(metric, str):
        raise ConfigError(f"{path}: {METRIC}: must be the name of a metric such as ndcg@10, got {metric!r}")
    keys = tuple(
        _parse_key(f"{path}: {name}", str(name), body) for name, body in document.items() if name != METRIC
    )
    return SearchSpace(keys, metric, str(path))


def _parse_key(where: str, path: str, values: Any) -> SearchKey:
    """Parse a key and its values.

    Args:
        where: The file and the key, for errors.
        path: The key.
        values: The list of choices, or the map of a range.

    Raises:
        ConfigError: The key cannot be searched, or the values are not valid.
    """
    fixed_key = next((key for key in _FIXED if f"{path}.".startswith(f"{key}.")), None)
    if fixed_key:
        raise ConfigError(
            f"{where}: scores of trials with different {fixed_key} cannot be compared; set it for all trials with --set"
        )
    if isinstance(values, list):
        return _parse_choices(where, path, values)
    if not yaml.is_map(values):
        raise ConfigError(f"{where}: a single value cannot be searched, got {values!r}; must be {_EXAMPLES}")
    kinds = [kind for kind in KINDS if kind in values]
    if len(kinds) != 1:
        unknown = next((str(name) for name in values if name not in (*KINDS, "step")), "")
        suggestion = suggest_sentence(unknown, KINDS)
        dots_hint = (
            f" A key within a key is written with dots: {path}.{unknown}."
            if unknown and not suggestion
            else ""
        )
        raise ConfigError(
            f"{where}: must be {_EXAMPLES}, got a map of {', '.join(map(str, values))}.{suggestion}{dots_hint}"
        )
    return _parse_range(where, path, kinds[0], values)


def _parse_choices(where: str, path: str, choices: list[Any]) -> SearchKey:
    """Parse a list of choices. Raises ConfigError unless it has at least two different choices."""
    if len(choices) < 2:
        raise ConfigError(f"{where}: must have at least two choices, got {choices!r}")
    repeated = next(
        (value for index, value in enumerate(choices) if find_choice(tuple(choices), value) != index), None
    )
    if repeated is not None:
        raise ConfigError(f"{where}: the choice {repeated!r} occurs twice")
    return SearchKey(path, "choice", tuple(choices))


def _parse_range(where: str, path: str, kind: str, values: Mapping[str, Any]) -> SearchKey:
    """Parse a `range`, `log` or `int`. Raises ConfigError if its ends or its step are not valid."""
    unknown = [name for name in values if name not in (kind, "step")]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} beside {kind}; only step is allowed")
    ends, step = values[kind], values.get("step", 1 if kind == "int" else 0)
    number_types = (int,) if kind == "int" else (int, float)
    whole = "whole " if kind == "int" else ""
    is_pair = isinstance(ends, list) and len(ends) == 2
    if not is_pair or not all(_is_number(end, number_types) for end in ends):
        raise ConfigError(f"{where}.{kind}: must be [low, high] of {whole}numbers, got {ends!r}")
    low, high = ends if kind == "int" else map(float, ends)
    if not low < high:
        raise ConfigError(f"{where}.{kind}: the lower end {low:g} is not below the upper end {high:g}")
    if kind == "log" and low <= 0:
        raise ConfigError(
            f"{where}.log: the lower end must be above 0 to have a logarithm, got {low:g}; or use range"
        )
    if kind == "log" and "step" in values:
        raise ConfigError(f"{where}.step: a logarithmic range has no steps; use range or int, or remove step")
    if not _is_number(step, number_types) or ("step" in values and not 0 < step <= high - low):
        raise ConfigError(
            f"{where}.step: must be a {whole}number above 0 and at most {high - low:g}, got {step!r}"
        )
    if step and not math.isclose((high - low) / step, round((high - low) / step), abs_tol=1e-9):
        last_value = low + step * math.floor((high - low) / step + 1e-9)
        raise ConfigError(
            f"{where}.step: steps of {step:g} lead from {low:g} to {last_value:g}, not to {high:g}"
        )
    return SearchKey(path, kind, low=low, high=high, step=step)


def _is_number(value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a value is a finite number of one of these types."""
    return isinstance(value, types) and not isinstance(value, bool) and math.isfinite(value)
