"""Changes of single keys of a scenario's document."""

from __future__ import annotations

from typing import Any

from nonet import yaml
from nonet.controller.scenario.document.hidden import is_hidden
from nonet.errors import ConfigError


def apply_change(document: Any, change: str) -> None:
    """Apply a change such as `a.b=c` to a document, in place."""
    path, equals, value_text = change.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set wants a.b=value, got {change!r}")
    put_value(document, path.strip(), yaml.parse(value_text, f"--set {path}"), f"--set {path}")


def put_value(document: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set the key at a path of a document, and create missing maps on the way.

    Args:
        document: The document, changed in place.
        path: The keys from the top, such as `a.b.c`.
        value: The new value.
        source: The text that error messages begin with.

    Raises:
        ConfigError: A key on the path has a value that is not a map.
    """
    *parent_keys, last_key = path.split(".")
    parent = document
    for depth, key in enumerate(parent_keys):
        child: Any = parent.get(key)
        if child is None:  # a missing key, or one without a value, such as `pretrain:`
            child = parent[key] = {}
        if not yaml.is_map(child):
            value_text = "a value" if is_hidden(parent_keys[: depth + 1]) else repr(child)
            raise ConfigError(f"{source}: {key} holds {value_text}, which has no keys")
        parent = child
    parent[last_key] = value
