"""RoleKind: the facts about a role that a plan and a run need before any worker is created.

The shipped kinds are the modules of `nonet.workers.roles.kinds`. A user-defined role is `roles: {name: {use: file.py:SPEC}}`. Its
workers are a subclass of `DistributeWorker`, and a stage loop calls them through `session.group(name)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry


@dataclass(frozen=True)
class RoleKind:
    """A kind of role.

    Attributes:
        cls: Class of a worker, or its dotted path `package.module:Name`.
        options: Keys of the scenario's role that are keyword arguments of the class.
        args: Names of the settings that the constructor takes first: "run" (`RunSetup`), "evaluate" (`Evaluate`).
        default: Keys of the role in `roles:` if the scenario leaves it out; None if the role exists only when it is named.
        order: Position among the roles of a plan; user-defined roles come last.
        gang: Whether its workers join the trainers' process group.
        keeps: State of the model on its device: "training" (weights, optimizer, gradients), "weights", "rows", or "" for nothing.
        divides: Whether several of its workers divide the weights of the model if the trainers' engine does.
        follows_shares: Whether its workers in the trainers' processes get the samples of their trainers: those of a tensor
            group get the same ones, and what they return is collected once.
        beside: Names of roles that run in its process although `roles:` does not name them.
        light: Whether its process does not load Nonet's torch code, so that its workers need little memory.
        lists: Whether it exists only with a model that recommends lists of items.
        restarts: Whether a worker that died is restarted and its remembered calls are repeated.
    """

    cls: str | type[Any]
    options: type[StrictModel] = StrictModel
    args: tuple[str, ...] = ()
    default: dict[str, Any] | None = None
    order: int = 100
    gang: bool = False
    keeps: str = ""
    divides: bool = False
    follows_shares: bool = False
    beside: tuple[str, ...] = field(default=())
    light: bool = False
    lists: bool = False
    restarts: bool = False


ROLES = PluginRegistry(
    "role",
    RoleKind,
    "nonet.workers.roles.kinds",
    contract={"cls": "nonet.workers.runtime:DistributeWorker"},
)


@cache
def get_shipped_roles() -> dict[str, RoleKind]:
    """Return the kinds of the roles that every run has by default, by name, in the order of a plan."""
    kinds = {name: ROLES.get(name) for name in ROLES.list_shipped()}
    default_kinds = {name: kind for name, kind in kinds.items() if kind.default is not None}
    return dict(sorted(default_kinds.items(), key=lambda item: item[1].order))


@cache
def get_gang_roles() -> frozenset[str]:
    """Return the names of the shipped roles that join the trainers' process group."""
    return frozenset(name for name in ROLES.list_shipped() if ROLES.get(name).gang)
