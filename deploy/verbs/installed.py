"""Verbs of installed packages: commands that their entry points add to the command line."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nonet.contracts import find_entry_point, list_entry_points
from nonet.errors import ConfigError
from nonet.plugins import load_heavy
from nonet.trust import approve_opened_folders, import_no_code

_ENTRY_POINTS = "nonet.verbs"  # the group of entry points
_PAGE = "docs/how-to/extend.md"  # for errors
_RUNNING = ("run", "plan", "tune", "board", "submit", "resume", "tradeoff", "parity", "chaos", "manifest")
_STEERING = ("attach", "detach", "set", "scale")
_ASKING = ("evaluate", "recommend", "score", "serve", "publish", "export")
_READING = frozenset(("status", "logs", "why", "runs", "report", "versions", "top"))
"""Commands that import no code of a run, not even approved code."""
_RUNS_CODE = frozenset(
    (*_RUNNING, *_STEERING, *_ASKING)
)  # commands that may run code of a run or of an export
TRUST_HELP = "Approve the code of the runs and exports that the command opens; it is remembered."


def approve(given: bool) -> None:
    """Approve the code of the runs and exports that this command opens, if the option --trust is given."""
    if given:
        approve_opened_folders()


TrustOption = Annotated[
    bool, typer.Option("--trust", help=TRUST_HELP, is_eager=True, expose_value=False, callback=approve)
]


def _add_trust_option(command: Any) -> None:
    """Add the option --trust to a command, once."""
    if any(parameter.name == "trust" for parameter in command.params):
        return

    def take_option(trust: TrustOption = False) -> None:
        """Take the option alone."""

    app = typer.Typer(add_completion=False)
    app.command()(take_option)
    command.params += [
        parameter for parameter in typer.main.get_command(app).params if parameter.name == "trust"
    ]


class VerbGroup(TyperGroup):
    """The shipped commands, and those of installed packages, which are imported only when they are called or described."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *(point.name for point in list_entry_points(_ENTRY_POINTS))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of this name.

        Raises:
            ConfigError: The verb of an installed package is neither a function nor a `typer.Typer`, or its name is
                taken.
        """
        entry_point = find_entry_point(cmd_name, _ENTRY_POINTS, f"verb {cmd_name!r}", self.commands)
        if entry_point is None:
            command = super().get_command(ctx, cmd_name)
            if command is not None and cmd_name in _RUNS_CODE:
                _add_trust_option(command)
            if command is not None and cmd_name in _READING and command.callback is not None:
                command.callback = import_no_code()(command.callback)
            return command
        verb = load_heavy(entry_point.value)
        if isinstance(verb, typer.Typer):
            app = verb
        elif inspect.isfunction(verb) and verb.__doc__:
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(cmd_name)(verb)
        else:
            raise ConfigError(
                f"verb {cmd_name!r} ({entry_point.value}): expected a function with a docstring, or a typer.Typer, got {verb!r}; "
                f"see {_PAGE}"
            )
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command
