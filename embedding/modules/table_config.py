"""Sparse tables as a configuration describes them: plain dicts in, a checked `TableSpec` with its features out.

    {"item": {"dim": 32, "features": ["item", "last_item"], "combiner": "mean", "optimizer": "adam", "lr": 0.01,
              "admit": {"count": 3}, "evict": {"by": "lru", "ttl_steps": 10_000}, "budget": {"rows": 1_000_000}},
     "city": {"dim": 8, "text": True}}

A feature belongs to one table; a table serves any number of features. Every message names the table and the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nonet.embedding.tables import TableSpec
from nonet.errors import ConfigError

COMBINERS = ("sum", "mean")
_NESTED: dict[str, dict[str, str]] = {
    "admit": {"count": "admit_count", "probability": "admit_probability"},
    "evict": {"by": "evict", "ttl_steps": "ttl_steps"},
    "budget": {"rows": "budget_rows", "bytes": "budget_bytes"},
}
_PLAIN = tuple(
    field.name
    for field in fields(TableSpec)
    if field.name not in {name for names in _NESTED.values() for name in names.values()}
)
_KEYS = (*_PLAIN, *_NESTED, "features", "combiner", "text")


@dataclass(frozen=True, slots=True)
class TableConfig:
    """A table: how its rows live (`spec`), which features read it, how a bag is pooled, and whether ids are text."""

    spec: TableSpec
    features: tuple[str, ...]
    combiner: str = "sum"
    text: bool = False


def table_configs(
    tables: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any] | None = None
) -> dict[str, TableConfig]:
    """The tables of a configuration; `defaults` fill in what a table leaves out. Raises ConfigError."""
    configs = {name: _table(name, {**(defaults or {}), **table}) for name, table in tables.items()}
    owner: dict[str, str] = {}
    for name, config in configs.items():
        for feature in config.features:
            if feature in owner:
                raise ConfigError(
                    f"feature {feature!r} is listed by the tables {owner[feature]!r} and {name!r}; "
                    "a feature reads one table, so name one of the two uses differently"
                )
            owner[feature] = name
    return configs


def _table(name: str, given: Mapping[str, Any]) -> TableConfig:
    where = f"table {name!r}"
    _check_keys(where, given, _KEYS)
    combiner = given.get("combiner", "sum")
    if combiner not in COMBINERS:
        raise ConfigError(f"{where}: combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}")
    text = given.get("text", False)
    if not isinstance(text, bool):
        raise ConfigError(f"{where}: text must be true or false, got {text!r}")
    features = tuple(given.get("features") or [name])
    if len(set(features)) < len(features):
        raise ConfigError(f"{where}: features {list(features)} name one twice")
    settings = {key: given[key] for key in _PLAIN if key in given}
    for group, names in _NESTED.items():
        settings |= _nested(where, group, given.get(group), names)
    if settings.get("dim") is None:
        raise ConfigError(f"{where}: dim is required and missing; say how wide its rows are, e.g. dim: 32")
    try:
        return TableConfig(TableSpec(**settings), features, combiner, text)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _nested(where: str, group: str, given: Any, names: Mapping[str, str]) -> dict[str, Any]:
    if group == "budget" and isinstance(given, int) and not isinstance(given, bool):
        given = {"bytes": given}
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {group} must be a map of {', '.join(names)}, got {given!r}")
    _check_keys(f"{where}: {group}", given, tuple(names))
    return {names[key]: value for key, value in given.items() if value is not None}


def _check_keys(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint}; known keys: {', '.join(known)}")
