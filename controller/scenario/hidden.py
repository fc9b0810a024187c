"""Hiding of the values of `env.vars`, which a run receives but which are never printed or stored.

A stored document contains `HIDDEN` in place of each value. When a run is resumed, the values come from the given scenario,
from `--set`, or from the environment. A value that is only a reference, `${NAME}`, is a name and is kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from nonet import yaml
from nonet.errors import ConfigError

HIDDEN = "(not stored)"
_REFERENCE = re.compile(r"\$\{\w+\}")


class _HasPools(Protocol):
    """The part of a `Scenario` that holds values of `env.vars`."""

    @property
    def pools(self) -> Mapping[str, Any]:
        """The pools of the scenario."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced."""
        ...


_Scenario = TypeVar("_Scenario", bound=_HasPools)


def is_hidden(path: Sequence[object]) -> bool:
    """Return whether a path of keys leads to a value that must not be shown."""
    return len(path) > 2 and path[0] == "pools" and path[2] == "env" and "vars" in path[2:]


def hide(document: Any) -> Any:
    """Return a scenario's document, or a part of one from its top, with `HIDDEN` for each value of `env.vars`."""
    return _hide_values(document, ())


def _hide_values(value: Any, path: tuple[str, ...]) -> Any:
    """Return a part of a document with `HIDDEN` for each value that must not be shown."""
    if yaml.is_map(value):
        return {key: _hide_values(part, (*path, str(key))) for key, part in value.items()}
    if not is_hidden(path) or (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        return value
    return HIDDEN


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the values of `--set pools.X.env.vars.KEY=value` and of its wider forms."""
    shown: list[str] = []
    change_next = False
    for word in words:
        option, equals, change = word.partition("=")
        if change_next:
            shown.append(_hide_change(word))
        elif option == "--set" and equals:
            shown.append(f"--set={_hide_change(change)}")
        else:
            shown.append(word)
        change_next = word == "--set"
    return shown


def _hide_change(change: str) -> str:
    """Return a `path=value` change without hidden values."""
    path, equals, text = change.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or keys[0] != "pools":
        return change
    try:
        value = yaml.parse(text, path)
    except ConfigError:
        return f"{path}={HIDDEN}"
    hidden = _hide_values(value, keys)
    return (
        change if hidden == value else f"{path}={hidden if isinstance(hidden, str) else json.dumps(hidden)}"
    )


def restore_values(
    scenario: _Scenario, source: _Scenario | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[_Scenario, list[str]]:
    """Restore the hidden values of a stored scenario.

    Args:
        scenario: The stored scenario.
        source: The same scenario with its values, if there is one.
        environment: Variables that are used for values that `source` lacks.

    Returns:
        The scenario with its values, and the names of the values that came from the environment.

    Raises:
        ConfigError: A value is in neither of them; the message names the variables.
    """
    pools = dict(scenario.pools)
    taken: list[str] = []
    missing: list[str] = []
    for name, pool in scenario.pools.items():
        known = dict(pool.env.vars) if pool.env else {}
        for key in [key for key, value in known.items() if value == HIDDEN]:
            beside = source.pools[name].env if source is not None and name in source.pools else None
            value = beside.vars.get(key, HIDDEN) if beside else HIDDEN
            if value == HIDDEN and key in environment:
                value = environment[key]
                taken.append(key)
            if value == HIDDEN:
                missing.append(f"pools.{name}.env.vars.{key}")
            known[key] = value
        if pool.env:
            pools[name] = pool.model_copy(update={"env": pool.env.model_copy(update={"vars": known})})
    if missing:
        key = missing[0].rpartition(".")[2]
        raise ConfigError(
            f"{', '.join(missing)}: a run does not store these values; set them in the environment "
            f"(export {key}=...) or give --set {missing[0]}=..."
        )
    return (scenario.model_copy(update={"pools": pools}) if taken or source else scenario), taken
