"""Hiding of the values of `env.vars`, which a run receives but which are never printed or stored.

A stored document contains `HIDDEN` in place of each value. When a run is resumed, the values come from the scenario that is
given again, from `--set`, or from the environment. A value that is only a reference `${NAME}` is not secret and is kept.
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
    """Return whether a path of keys leads to a value that must not be shown, `pools.NAME.env.vars` or below."""
    return len(path) > 2 and path[0] == "pools" and path[2] == "env" and "vars" in path[2:]


def hide(document: Any) -> Any:
    """Return a copy of a scenario's document, or of some of its top-level keys, with `HIDDEN` for each value of `env.vars`."""
    return _hide_values(document, ())


def _hide_values(value: Any, path: tuple[str, ...]) -> Any:
    """Return a copy of the value at a path of a document, with `HIDDEN` for each value that must not be shown."""
    if yaml.is_map(value):
        return {key: _hide_values(child, (*path, str(key))) for key, child in value.items()}
    if not is_hidden(path) or (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        return value
    return HIDDEN


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `HIDDEN` for each value of `env.vars` that `--set` gives.

    This covers `--set pools.X.env.vars.KEY=value`, `--set=...`, and maps such as `--set pools.X.env={vars: {KEY: value}}`.
    """
    shown: list[str] = []
    is_change = False  # whether the word is the argument of `--set`
    for word in words:
        option, equals, change = word.partition("=")
        if is_change:
            shown.append(_hide_change(word))
        elif option == "--set" and equals:
            shown.append(f"--set={_hide_change(change)}")
        else:
            shown.append(word)
        is_change = word == "--set"
    return shown


def _hide_change(change: str) -> str:
    """Return a change `path=value` with `HIDDEN` for each value that must not be shown."""
    path, equals, value_text = change.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or keys[0] != "pools":
        return change
    try:
        value = yaml.parse(value_text, path)
    except ConfigError:  # a value that is not YAML may hold a secret anywhere
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
        source: The same scenario with its values, if it was given again.
        environment: The environment variables, which are used for values that `source` lacks.

    Returns:
        The scenario with its values, and the names of the variables that were taken from the environment.

    Raises:
        ConfigError: A value is in neither `source` nor the environment; the message names the variables.
    """
    pools = dict(scenario.pools)
    environment_keys: list[str] = []
    missing_paths: list[str] = []
    for name, pool in scenario.pools.items():
        env_vars = dict(pool.env.vars) if pool.env else {}
        source_env = source.pools[name].env if source is not None and name in source.pools else None
        for key in [key for key, value in env_vars.items() if value == HIDDEN]:
            value = source_env.vars.get(key, HIDDEN) if source_env else HIDDEN
            if value == HIDDEN and key in environment:
                value = environment[key]
                environment_keys.append(key)
            if value == HIDDEN:
                missing_paths.append(f"pools.{name}.env.vars.{key}")
            env_vars[key] = value
        if pool.env:
            pools[name] = pool.model_copy(update={"env": pool.env.model_copy(update={"vars": env_vars})})
    if missing_paths:
        key = missing_paths[0].rpartition(".")[2]
        raise ConfigError(
            f"{', '.join(missing_paths)}: a run does not store these values; set them in the environment "
            f"(export {key}=...) or give --set {missing_paths[0]}=..."
        )
    is_changed = bool(environment_keys or source)
    return (scenario.model_copy(update={"pools": pools}) if is_changed else scenario), environment_keys
