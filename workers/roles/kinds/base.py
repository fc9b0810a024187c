"""RoleKind: what a plan and a run know of a role before any of its workers is made.

Shipped ones are the modules of `nonet.workers.roles.kinds`; a role of the user's own is `roles: {name: {use: file.py:SPEC}}`.
Its workers are a `DistributeWorker` of the user's, which a loop reaches by `session.group(name)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry


@dataclass(frozen=True)
class RoleKind:
    """One kind of role.

    cls       class of a worker, or its dotted path `package.module:Name`
    options   keys of the scenario's role that are keyword arguments of the class
    args      what of the run its constructor is told first: "run" (RunSetup), "evaluate" (EvaluateSetup)
    default   its keys in `roles:` where a scenario leaves it out; None: it is there only where it is named
    order     place among roles in plans; those of the user's own come last
    gang      whether its workers meet in the trainers' process group
    keeps     of the model, on its device: "training" (weights, optimizer, gradients), "weights", "rows", or nothing
    beside    other roles that live in its process without being named
    light     whether it has no torch of ours inside, so that its workers ask for little
    lists     whether it is there only with a model that makes lists
    restarts  whether a worker that died is made anew and told its remembered calls again
    """

    cls: str | type[Any]
    options: type[StrictModel] = StrictModel
    args: tuple[str, ...] = ()
    default: dict[str, Any] | None = None
    order: int = 100
    gang: bool = False
    keeps: str = ""
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
def shipped_roles() -> dict[str, RoleKind]:
    """The roles that every run has unless it says otherwise, in order."""
    kinds = {name: ROLES.get(name) for name in ROLES.list_shipped()}
    named = {name: kind for name, kind in kinds.items() if kind.default is not None}
    return dict(sorted(named.items(), key=lambda item: item[1].order))


@cache
def gang_roles() -> frozenset[str]:
    """Shipped roles that meet in the trainers' process group."""
    return frozenset(name for name in ROLES.list_shipped() if ROLES.get(name).gang)
