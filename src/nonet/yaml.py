"""Read and write YAML 1.2 core: `1e-3` is a number; `on`, `no` and dates are strings.

ruamel.yaml implements YAML 1.2; its timestamps, which the core schema lacks, are read as strings. PyYAML implements 1.1,
which reads all three differently.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeGuard

from nonet.errors import ConfigError


def _make_yaml() -> Any:
    """Return a safe YAML 1.2 parser and writer without timestamps."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor

    class Core(SafeConstructor):
        """Safe constructor without 1.1's timestamps."""

    words = SafeConstructor.construct_yaml_str  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    Core.add_constructor("tag:yaml.org,2002:timestamp", words)  # pyright: ignore[reportUnknownMemberType]
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
        source: Where it comes from, for messages.

    Raises:
        ConfigError: The text is not valid YAML; the message has line and column.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return _make_yaml().load(text)
    except MarkedYAMLError as error:
        raise ConfigError(f"{source}: not valid YAML at {_format_problem(error)}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _format_problem(error: Any) -> str:
    """Format the place and the problem of a parser error (untyped in ruamel.yaml)."""
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
    return f"{where}: {' '.join(str(error.problem).split())}"


def is_map(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a part of a document has keys."""
    return isinstance(value, dict)


def read(path: Path) -> Any:
    """Read the document in a file.

    Raises:
        ConfigError: There is no such file, or it is not valid YAML.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a YAML text file: {error}") from None


def dump(value: Any) -> str:
    """Return a document as YAML text, with keys in their order."""
    out = io.StringIO()
    _make_yaml().dump(value, out)
    return out.getvalue()
