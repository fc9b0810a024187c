"""Write the generated reference pages: `python docs/generate.py`. `tests/test_docs.py` checks that the pages are current."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import nonet
from nonet import errors, plug
from nonet.controller.scenario.stage import STAGES
from nonet.deploy.cli import app
from nonet.models import MODELS
from nonet.models.tokenizer.kinds.base import TOKENIZERS
from nonet.samples.sources.base import SOURCES
from nonet.verbs import VERBS, SupportedVerbs
from nonet.workers.engines.base import ENGINES

FOLDER = Path(__file__).parent / "reference"
_RETURNED = ("GroupFuture", "Rollouts")  # classes that users do not construct
_JSON = "--json"  # almost every command has it
_COMMON = 2  # commands that must share a parameter and its help for it to be described once


def write_commands() -> str:
    """Return the page of commands and their options, from the command line's own help."""
    commands = [
        each
        for name, command in sorted(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]
        for each in _walk_commands(f"nonet {name}", command)
    ]
    counts = Counter(parameter for _, _, parameters in commands for parameter in parameters)
    common: dict[str, list[str]] = {_JSON: ["Print JSON. Most commands have it."]}
    for (label, text), count in counts.most_common():
        if count >= _COMMON and label != _JSON:
            common.setdefault(label, []).append(text)
    lines = [
        "# Commands",
        "",
        "These are the commands of `nonet`, as `nonet COMMAND --help` prints them. A command exits with 0 if it succeeds, 1 if "
        "the run fails, 2 after a mistake of the caller, and 130 if it is interrupted.",
        "",
        "Options with `...` may be repeated. Several commands have these:",
        "",
        *(f"- `{label}`: {' In other commands: '.join(texts)}" for label, texts in sorted(common.items())),
        "",
    ]
    for name, text, parameters in commands:
        arguments = [label for label, _ in parameters if not label.startswith("--")]
        shared = [label for label, text in parameters if text in common.get(label, ())]
        own = [
            f"- `{label}`: {text}"
            for label, text in parameters
            if text and label not in shared and (label, text) != (_JSON, "Print JSON.")
        ]
        shared_options = [f"`{label}`" for label in shared if label.startswith("--")]
        lines += [f"## {' '.join((name.removeprefix('nonet '), *arguments))}", "", text, ""]
        lines += [*own, *([f"- {', '.join(shared_options)}"] if shared_options else [])]
        lines += [""] if own or shared_options else []
    return "\n".join(lines)


def _walk_commands(name: str, command: object) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield name, help and parameters of one command, or of each command of a group."""
    help_text = inspect.cleandoc(getattr(command, "help", "") or "").replace("\f", "")
    parameters = [_describe_parameter(p) for p in getattr(command, "params", []) if p.name != "help"]
    parts = sorted(getattr(command, "commands", {}).items())
    if not parts or getattr(command, "invoke_without_command", False):
        yield name, " ".join(help_text.split()), parameters
    for part, inner in parts:
        yield from _walk_commands(f"{name} {part}", inner)


def _describe_parameter(parameter: Any) -> tuple[str, str]:
    """Return the label of an argument or option, and its help."""
    text = " ".join((parameter.help or "").replace("<", "&lt;").split())
    if parameter.param_type_name != "option":
        return parameter.metavar or parameter.name.upper(), text
    once = text.replace("; may be repeated", "")
    return parameter.opts[-1] + ("..." if once != text else ""), once


def write_errors() -> str:
    """Return the page of the errors that users can meet, from their docstrings."""
    lines = [
        "# Errors",
        "",
        "These are the exceptions in `nonet.errors`, with their base classes. A message says what is wrong, what was given, "
        "what is allowed, and the next step.",
        "",
    ]
    for error in _walk(errors.NonetError):
        text = " ".join(inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"- `{error.__name__}` (`{error.__bases__[0].__name__}`): {text}")
    return "\n".join([*lines, ""])


def _walk(error: type[errors.NonetError]) -> Iterator[type[errors.NonetError]]:
    yield error
    for below in error.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _walk(below)


def write_names() -> str:
    """Return the page of public Python names, with the first lines of their docstrings."""
    extra = {name: getattr(plug, name) for name in sorted(set(plug.__all__) - set(nonet.__all__))}
    documented = {
        name: value for name, value in extra.items() if inspect.isclass(value) or inspect.isfunction(value)
    }
    own_classes = {name: value for name, value in documented.items() if value.__module__ != errors.__name__}
    kinds = [name for name, value in own_classes.items() if _summarise(value).startswith("A kind of ")]
    lines = [
        "# Python names",
        "",
        "The names of these modules are public. Other modules are private and change without notice.",
        "",
        "## nonet",
        "",
        *(
            f"- `{name}{'' if name in _RETURNED else _shorten(value)}`: {_summarise(value)}"
            for name, value in ((name, getattr(nonet, name)) for name in sorted(nonet.__all__))
        ),
        "",
        "## nonet.plug",
        "",
        "[Plug-ins](../how-to/extend.md) import from this module: the names of `nonet` that they need, and these.",
        "",
        f"- Kinds of parts, which the how-to pages show: {', '.join(f'`{name}`' for name in kinds)}.",
        *(f"- `{name}`: {_summarise(value)}" for name, value in own_classes.items() if name not in kinds),
        f"- Types of options, constants and [errors](errors.md): {', '.join(f'`{n}`' for n in extra if n not in own_classes)}.",
        "",
    ]
    return "\n".join(lines)


def _summarise(value: object) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _shorten(value: object) -> str:
    """Return the parameter names of a function or class in parentheses."""
    if not callable(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters
    except ValueError:
        return ""
    return f"({', '.join(re.sub('^_', '', p.name) for p in parameters.values() if p.name != 'self')})"


def write_verbs() -> str:
    """Return the page of the verbs that runs have, from what the shipped kinds declare."""
    models = {name: MODELS.get(name).verbs for name in MODELS.list_shipped()}
    notes: dict[str, int] = {}

    def describe(supported: SupportedVerbs, verb: str) -> str:
        limit = supported.find_limit(verb)
        return "yes" if limit is None else f"no ({notes.setdefault(limit, len(notes) + 1)})"

    verbs_by_cells: dict[str, list[str]] = {}
    for verb in VERBS:
        cells = " | ".join(describe(supported, verb) for supported in models.values())
        verbs_by_cells.setdefault(cells, []).append(f"`{verb}`")
    verbs_by_limit: dict[tuple[str, str], list[str]] = {}
    for part, registry in {
        "source": SOURCES,
        "tokenizer": TOKENIZERS,
        "engine": ENGINES,
        "stage": STAGES,
    }.items():
        for name in registry.list_shipped():
            for verb in VERBS:
                if limit := registry.get(name).verbs.find_limit(verb):
                    verbs_by_limit.setdefault((f"{part} `{name}`", limit), []).append(f"`{verb}`")
    return "\n".join(
        [
            "# Verbs by kind of run",
            "",
            "A run has a verb if its model and its other parts have it. A command refuses a run without the verb before anything "
            "starts, and `nonet plan` lists the verbs that a run lacks. `/recommend` and `/score` are paths of the server.",
            "",
            f"| verbs | {' | '.join(f'`{name}`' for name in models)} |",
            f"|---|{'---|' * len(models)}",
            *(f"| {', '.join(verbs)} | {cells} |" for cells, verbs in verbs_by_cells.items()),
            "",
            *(f"{number}. Such a run {note}." for note, number in notes.items()),
            "",
            "All other shipped parts have all verbs, except these:",
            "",
            *(
                f"- The {part} has no {', '.join(verbs)}: it {limit}."
                for (part, limit), verbs in verbs_by_limit.items()
            ),
            "",
        ]
    )


PAGES = {
    "cli.md": write_commands,
    "errors.md": write_errors,
    "python.md": write_names,
    "verbs.md": write_verbs,
}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write(), encoding="utf-8")
