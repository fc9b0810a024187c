"""Write the generated reference pages: `python docs/generate.py`. `tests/test_docs.py` checks that the pages are current."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import typer

import nonet
from nonet import errors
from nonet.deploy.cli import app

FOLDER = Path(__file__).parent / "reference"


def write_commands() -> str:
    """Return the page of commands and their options, from the command line's own help."""
    lines = [
        "# Commands",
        "",
        "Every command has `--help`. This page is generated from the command line.",
        "",
    ]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        lines += _describe_command(f"nonet {name}", command)
    return "\n".join(lines)


def _describe_command(name: str, command: object) -> Iterator[str]:
    """Yield the lines of one command, or of each command of a group."""
    text = inspect.cleandoc(getattr(command, "help", "") or "")
    yield from (f"## {name}", "", text.replace("\f", ""), "")
    parameters = [p for p in getattr(command, "params", []) if p.name != "help"]
    if parameters:
        yield from ("| argument or option | meaning |", "|---|---|")
        for parameter in parameters:
            label = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.name.upper()
            text = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
            yield f"| `{label}` | {text} |"
        yield ""
    for part, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _describe_command(f"{name} {part}", inner)


def write_errors() -> str:
    """Return the page of the errors that users can meet, from their docstrings."""
    lines = [
        "# Errors",
        "",
        "Every error is a `nonet.errors.NonetError`. A message says what is wrong, what was given, what is allowed, "
        "and the next step.",
        "",
    ]
    lines += ["| error | base | exit code | when |", "|---|---|---|---|"]
    for error in _walk(errors.NonetError):
        text = " ".join(inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {error.exit_code} | {text} |")
    return "\n".join([*lines, ""])


def _walk(error: type[errors.NonetError]) -> Iterator[type[errors.NonetError]]:
    yield error
    for below in error.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _walk(below)


def write_names() -> str:
    """Return the page of public Python names, with their signatures and the first lines of their docstrings."""
    lines = [
        "# Python names",
        "",
        "Everything public is a name of one of these modules. Other modules are private and change without notice.",
        "",
    ]
    for module in (nonet,):
        lines += [f"## {module.__name__}", "", "| name | description |", "|---|---|"]
        for name in sorted(module.__all__):
            value = getattr(module, name)
            text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
            lines.append(f"| `{name}{_shorten(value)}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def _shorten(value: object) -> str:
    """Return the parameter names of a function or class in parentheses."""
    if not callable(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters
    except ValueError:
        return ""
    return f"({', '.join(re.sub('^_', '', p.name) for p in parameters.values() if p.name != 'self')})"


PAGES = {"cli.md": write_commands, "errors.md": write_errors, "python.md": write_names}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write(), encoding="utf-8")
