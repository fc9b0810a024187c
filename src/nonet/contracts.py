"""Contracts of plug-in classes: the methods that a class of a kind must have, and the arguments that they must accept.

A class that breaks its contract is refused in one line, which names the file of the class, what is wrong, and the
page of the documentation that shows a correct one.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nonet.errors import ConfigError


def check_class(value: Any, base: type, title: str, page: str) -> None:
    """Check that a plug-in is a complete subclass of a base class.

    Args:
        value: The object that a reference or an entry point leads to.
        base: The abstract base class of the kind.
        title: The start of error messages, such as "store 'cassandra'".
        page: The page of the documentation that shows how to write one.

    Raises:
        ConfigError: The object is no subclass, lacks a method, or has a method that does not accept the arguments
            of the base class.
    """
    problems = _find_class_problems(value, base)
    if problems:
        raise ConfigError(f"{title} ({_locate_source(value)}): {'; '.join(problems)}; see {page}")


def find_entry_point(name: str, group: str, title: str, shipped: Collection[str]) -> EntryPoint | None:
    """Return the entry point with a name, or None if no installed package has one.

    Raises:
        ConfigError: The name is already taken by a shipped plug-in or by a second package.
    """
    points = list(entry_points(group=group, name=name))
    if points and (name in shipped or len(points) > 1):
        owner = "Nonet ships" if name in shipped else f"{points[1].value} has"
        raise ConfigError(f"{title} ({points[0].value}): the name is taken, {owner} it; choose another name")
    return points[0] if points else None


def _find_class_problems(value: Any, base: type) -> list[str]:
    """List what is wrong with a plug-in class; an empty list if nothing is."""
    if not isinstance(value, type) or not issubclass(value, base):
        return [f"expected a subclass of {base.__name__}, got {value!r}"]
    missing = sorted(getattr(value, "__abstractmethods__", ()))
    if missing:
        return [f"class {value.__name__} has no {' and no '.join(missing)}"]
    return [problem for name in sorted(vars(base)) if (problem := _find_signature_problem(value, base, name))]


def _find_signature_problem(value: type, base: type, name: str) -> str:
    """Describe why a method cannot be called as the base class declares; empty if it can."""
    declared, written = getattr(base, name), getattr(value, name)
    if name.startswith("__") or written is declared or not inspect.isfunction(declared):
        return ""
    expected = inspect.signature(declared)
    by_keyword = [key for key, p in expected.parameters.items() if p.kind is p.KEYWORD_ONLY]
    by_position = [
        p for p in expected.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    try:
        inspect.signature(written).bind(*(None for _ in by_position), **dict.fromkeys(by_keyword))
    except (TypeError, ValueError):
        return f"{value.__name__}.{name} does not accept {expected}"
    return ""


def _locate_source(value: Any) -> str:
    """Return the file that defines an object, or its module if there is no file."""
    try:
        return inspect.getsourcefile(value) or value.__module__
    except TypeError:
        return type(value).__module__
