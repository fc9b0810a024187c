"""Read and write YAML 1.2 (core schema): `1e-3` is a number; `on`, `no` and dates are strings.

ruamel.yaml implements YAML 1.2, and timestamps, which the core schema lacks; here they are read as strings. PyYAML is not
used: it implements YAML 1.1, in which `1e-3` is a string, `on` and `no` are booleans, and dates are timestamps.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeGuard, cast

from nonet.atomic import read_content
from nonet.errors import ConfigError

_MAX_VALUES = 1_000_000  # that a document may stand for when its aliases are written out


def _make_yaml() -> Any:
    """Return a safe YAML 1.2 parser and writer without timestamps."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor

    class Core(SafeConstructor):
        """Safe constructor that reads timestamps as strings."""

    construct_string = SafeConstructor.construct_yaml_str  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    Core.add_constructor("tag:yaml.org,2002:timestamp", construct_string)  # pyright: ignore[reportUnknownMemberType]
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = Core
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[attr-defined]
    yaml.width = 120
    return yaml


def parse(text: str, source: str = "text") -> Any:
    """Parse one YAML document into plain dicts, lists and scalars.

    Args:
        text: The document.
        source: Where the document comes from, for messages.

    Raises:
        ConfigError: The text is not valid YAML, in which case the message has line and column; or its aliases stand for very
            many values.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        document = _make_yaml().load(text)
        if _count_values(document, {}) > _MAX_VALUES:
            raise ConfigError(
                f"{source}: its aliases (*name) stand for more than {_MAX_VALUES:,} values; write fewer of them"
            )
        return document
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: brackets are nested too deeply") from None
    except MarkedYAMLError as error:
        raise ConfigError(f"{source}: not valid YAML at {_format_problem(error)}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _count_values(value: Any, counts: dict[int, int]) -> int:
    """Return the number of values in a document, each alias counted like what it stands for.

    Args:
        value: The document, or a part of it.
        counts: The numbers of the maps and lists that were counted before, by their `id`.
    """
    key, parts = id(value), list[Any]()
    if is_map(value):
        parts = [part for entry in value.items() for part in entry]
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
    if key not in counts:
        counts[key] = _MAX_VALUES  # while it is counted, for what contains itself
        counts[key] = 1 + sum(_count_values(part, counts) for part in parts)
    return counts[key]


def locate_values(text: str) -> dict[tuple[str, ...], int]:
    """Return the line numbers, from 1, of the values of a valid YAML document, by the keys that lead to them.

    A map without keys and a list count as one value each.
    """
    lines: dict[tuple[str, ...], int] = {}
    _add_lines(_make_yaml().compose(text), (), lines)
    return lines


def _add_lines(node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    """Add the line numbers of a parsed node and of all nodes below it (untyped in ruamel.yaml)."""
    if node.id != "mapping" or not node.value:
        lines.setdefault(path, node.start_mark.line + 1)
        return
    merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
    for key, value in node.value:
        if key.tag != "tag:yaml.org,2002:merge":
            _add_lines(value, (*path, str(key.value)), lines)
    for maps in merged:  # `<<: *anchor`; a map's own keys come first
        for value in maps.value if maps.id == "sequence" else [maps]:
            _add_lines(value, path, lines)


def _format_problem(error: Any) -> str:
    """Format the place and the problem of a parser error (untyped in ruamel.yaml)."""
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
    return f"{where}: {' '.join(str(error.problem).split())}"


def is_map(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value in a document is a map."""
    return isinstance(value, dict)


def read(path: Path) -> Any:
    """Return the document in a file as plain dicts, lists and scalars.

    Raises:
        ConfigError: There is no such file, or it is not valid YAML.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return parse(read_content(path).decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a YAML text file: {error}") from None


def dump(value: Any) -> str:
    """Return a document as YAML text, with keys in the order of the dicts."""
    out = io.StringIO()
    _make_yaml().dump(value, out)
    return out.getvalue()
