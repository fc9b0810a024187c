"""Values of `env.vars`: the run gets them; nothing prints or stores them, only their names.

What a scenario's document holds in their place is `HIDDEN`; who resumes takes the values from the scenario at hand, `--set`, or
the environment. A value that is nothing but a reference, `${NAME}`, is a name, and stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from nonet.controller.scenario import yaml
from nonet.errors import ConfigError

HIDDEN = "(not stored)"
_REFERENCE = re.compile(r"\$\{\w+\}")


class _HasPools(Protocol):
    """The part of a `Scenario` that holds values of `env.vars`."""

    @property
    def pools(self) -> Mapping[str, Any]: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...


_Scenario = TypeVar("_Scenario", bound=_HasPools)


def is_hidden(path: Sequence[object]) -> bool:
    """Whether the keys of a path lead to what must not be shown."""
    return len(path) > 2 and path[0] == "pools" and path[2] == "env" and "vars" in path[2:]


def hide(document: Any) -> Any:
    """A scenario's document, or a part of one from its top, with `HIDDEN` for each value of env.vars."""
    return _hidden(document, ())


def _hidden(value: Any, path: tuple[str, ...]) -> Any:
    if yaml.is_map(value):
        return {key: _hidden(part, (*path, str(key))) for key, part in value.items()}
    if not is_hidden(path) or (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        return value
    return HIDDEN


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Words of a command line, `--set pools.X.env.vars.KEY=value` and its wider forms without values."""
    shown: list[str] = []
    change_next = False
    for word in words:
        option, equals, change = word.partition("=")
        if change_next:
            shown.append(_change(word))
        elif option == "--set" and equals:
            shown.append(f"--set={_change(change)}")
        else:
            shown.append(word)
        change_next = word == "--set"
    return shown


def _change(change: str) -> str:
    path, equals, text = change.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or keys[0] != "pools":
        return change
    try:
        value = yaml.parse(text, path)
    except ConfigError:
        return f"{path}={HIDDEN}"
    hidden = _hidden(value, keys)
    return (
        change if hidden == value else f"{path}={hidden if isinstance(hidden, str) else json.dumps(hidden)}"
    )


def with_values(
    scenario: _Scenario, given: _Scenario | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[_Scenario, list[str]]:
    """A stored scenario with its hidden values, from `given` (the same scenario with values) or the environment.

    Also the names of what the environment gave. Raises ConfigError that names the variables nobody has a value for.
    """
    pools = dict(scenario.pools)
    taken: list[str] = []
    missing: list[str] = []
    for name, pool in scenario.pools.items():
        known = dict(pool.env.vars) if pool.env else {}
        for key in [key for key, value in known.items() if value == HIDDEN]:
            beside = given.pools[name].env if given is not None and name in given.pools else None
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
    return (scenario.model_copy(update={"pools": pools}) if taken or given else scenario), taken
