"""Verbs of installed packages: commands that their entry points add to the command line."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from typer.core import TyperGroup

from nonet.contracts import find_entry_point, list_entry_points
from nonet.errors import ConfigError
from nonet.plugins import load_heavy

_ENTRY_POINTS = "nonet.verbs"  # the group of entry points
_PAGE = "docs/how-to/extend.md"  # for errors


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
            return super().get_command(ctx, cmd_name)
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
