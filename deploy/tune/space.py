"""A search space: which keys of a scenario are searched, and which values each may take.

    stages.pretrain.lr: {log: [1e-3, 1e-2]}            a number, sampled by its logarithm
    model.dropout: {range: [0.0, 0.5]}                 a number
    model.width: {int: [32, 128], step: 32}            a whole number
    model.block: [transformer, hstu]                   one of these
    metric: ndcg@10                                    the validation metric, by default the scenario's

Pure: whether a value suits the scenario is checked when a scenario is loaded with it
(deploy/tune/subject.py).
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
MOST_CORNERS = 256
_DIGITS = 4
# Keys that define the task or the storage: scores of trials that differ in them cannot be compared.
_FIXED = (
    "name",
    "seed",
    "storage",
    "settings",
    "evaluate",
    "checkpoint",
    "deadlines",
    "data.split",
    "data.keep",
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
        step: The step between values, 0 for none.
    """

    path: str
    kind: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0

    def list_ends(self) -> tuple[Any, ...]:
        """Return every choice, or the lowest and the highest value."""
        return self.choices or (self.low, self.high)

    def round_value(self, value: float) -> Any:
        """Round a sampled number to four significant digits within the range."""
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
    """The search space.

    Attributes:
        keys: The keys in the order of the file.
        metric: The metric that the file names; None for the scenario's own.
        source: The file, for errors.
    """

    keys: tuple[SearchKey, ...]
    metric: str | None
    source: str

    def iterate_corners(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of the keys' ends.

        With more than 256 combinations, yield every combination of two keys' ends with the first end of all
        others.
        """
        ends = [key.list_ends() for key in self.keys]
        paths = [key.path for key in self.keys]
        if math.prod(map(len, ends)) <= MOST_CORNERS:
            yield from (dict(zip(paths, values, strict=True)) for values in itertools.product(*ends))
            return
        first = {path: values[0] for path, values in zip(paths, ends, strict=True)}
        for a, b in itertools.combinations(range(len(paths)), 2):
            for left, right in itertools.product(ends[a], ends[b]):
                yield first | {paths[a]: left, paths[b]: right}


def find_choice(choices: tuple[Any, ...], value: Any) -> int:
    """Return the index of a value among choices; True differs from 1."""
    return next(at for at, each in enumerate(choices) if type(each) is type(value) and each == value)


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


def _parse_key(where: str, path: str, body: Any) -> SearchKey:
    """Parse a key and its values. Raises ConfigError if the key cannot be searched or the values are not valid."""
    fixed = next((each for each in _FIXED if f"{path}.".startswith(f"{each}.")), None)
    if fixed:
        raise ConfigError(
            f"{where}: scores of trials with different {fixed} cannot be compared; set it for all trials with --set"
        )
    if isinstance(body, list):
        return _parse_choices(where, path, body)
    if not yaml.is_map(body):
        raise ConfigError(f"{where}: a single value cannot be searched, got {body!r}; must be {_EXAMPLES}")
    named = [kind for kind in KINDS if kind in body]
    if len(named) != 1:
        unknown = next((str(name) for name in body if name not in (*KINDS, "step")), "")
        hint = suggest_sentence(unknown, KINDS)
        dotted = (
            f" A key within a key is written with dots: {path}.{unknown}." if unknown and not hint else ""
        )
        raise ConfigError(
            f"{where}: must be {_EXAMPLES}, got a map of {', '.join(map(str, body))}.{hint}{dotted}"
        )
    return _parse_range(where, path, named[0], body)


def _parse_choices(where: str, path: str, body: list[Any]) -> SearchKey:
    """Parse a list of choices. Raises ConfigError unless it has at least two different choices."""
    if len(body) < 2:
        raise ConfigError(f"{where}: must have at least two choices, got {body!r}")
    twice = next((value for at, value in enumerate(body) if find_choice(tuple(body), value) != at), None)
    if twice is not None:
        raise ConfigError(f"{where}: the choice {twice!r} occurs twice")
    return SearchKey(path, "choice", tuple(body))


def _parse_range(where: str, path: str, kind: str, body: Mapping[str, Any]) -> SearchKey:
    """Parse a `range`, `log` or `int`. Raises ConfigError if its ends or its step are not valid."""
    unknown = [name for name in body if name not in (kind, "step")]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} beside {kind}; only step is allowed")
    ends, step = body[kind], body.get("step", 1 if kind == "int" else 0)
    numbers = (int,) if kind == "int" else (int, float)
    whole = "whole " if kind == "int" else ""
    if not isinstance(ends, list) or len(ends) != 2 or not all(_is_number(end, numbers) for end in ends):
        raise ConfigError(f"{where}.{kind}: must be [low, high] of {whole}numbers, got {ends!r}")
    low, high = ends if kind == "int" else map(float, ends)
    if not low < high:
        raise ConfigError(f"{where}.{kind}: the lower end {low:g} is not below the upper end {high:g}")
    if kind == "log" and low <= 0:
        raise ConfigError(
            f"{where}.log: the lower end must be above 0 to have a logarithm, got {low:g}; or use range"
        )
    if kind == "log" and "step" in body:
        raise ConfigError(f"{where}.step: a logarithmic range has no steps; use range or int, or remove step")
    if not _is_number(step, numbers) or ("step" in body and not 0 < step <= high - low):
        raise ConfigError(
            f"{where}.step: must be a {whole}number above 0 and at most {high - low:g}, got {step!r}"
        )
    if step and not math.isclose((high - low) / step, round((high - low) / step), abs_tol=1e-9):
        reached = low + step * math.floor((high - low) / step + 1e-9)
        raise ConfigError(
            f"{where}.step: steps of {step:g} lead from {low:g} to {reached:g}, not to {high:g}"
        )
    return SearchKey(path, kind, (), low, high, step)


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is a finite number of one of these types."""
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
