"""Declarations of group methods: how arguments are divided among the ranks and how results are collected.

    @nonet.method(rows=nonet.Shard, scale=nonet.Replicate, collect="concat")
    def double(self, rows, scale): ...

Arguments are never sharded implicitly: a list, dict, array, tensor or table without a marker is an error that lists
the markers. Scalars, text, None and handles are replicated. `timeout_s` and `retries` are options of every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from nonet.errors import ConfigError

Collect = Literal["concat", "list", "first", "sum", "mean", "stream"]
CALL_OPTIONS = ("timeout_s", "retries")  # Options of every call, so no method may have such a parameter.


@dataclass(frozen=True, slots=True)
class Shard:
    """Split the rows of a value into contiguous chunks of nearly equal size, one for each rank."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send the same value to every rank; a large value is stored once for all ranks."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Send the i-th value of a sequence to rank i."""

    value: Any


Marker = type[Shard] | type[Replicate] | type[PerRank]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class MethodDeclaration:
    """The declaration that `@method` attaches to a function.

    Attributes:
        markers: Markers by parameter name.
        collect: How results are collected.
        idempotent: Whether calls may be repeated.
        remember: Whether the last call is repeated on a restarted worker.
        away: Whether the method may run while the role's buffers are offloaded (`while_offloaded` of `method`).
        beside: Whether calls run concurrently with other calls (`concurrent` of `method`).
    """

    markers: dict[str, Marker]
    collect: Collect
    idempotent: bool
    remember: bool
    away: bool = False
    beside: bool = False


def method(
    *,
    collect: Collect = "list",
    idempotent: bool = False,
    remember: bool = False,
    while_offloaded: bool = False,
    concurrent: bool = False,
    **markers: Marker,
) -> Callable[[_F], _F]:
    """Declare a method that a `WorkerGroup` calls on its ranks.

    Args:
        collect: concat, list, first, sum, mean, or stream for a method that yields.
        idempotent: Whether running it twice is harmless, so that calls may have `retries`.
        remember: Whether a restarted worker receives the last such call again before it is admitted.
        while_offloaded: Whether it uses no device buffers, so that it may run while they are offloaded to host
            memory.
        concurrent: Whether several calls run at once, in threads of their own and in no order, also beside other
            methods.
        **markers: By parameter name, one of Shard, Replicate and PerRank.

    Raises:
        ConfigError: `collect` is unknown, a marked parameter does not exist, or a parameter has the name of a call
            option.
    """
    if collect not in get_args(Collect):
        raise ConfigError(f"collect={collect!r} is not one of {', '.join(get_args(Collect))}")

    def declare(function: _F) -> _F:
        parameters = inspect.signature(function).parameters
        for name in markers:
            if name not in parameters:
                raise ConfigError(
                    f"@method marks {name!r}, which is no parameter of {function.__qualname__}; it has {', '.join(parameters)}"
                )
        for name in CALL_OPTIONS:
            if name in parameters:
                raise ConfigError(
                    f"{function.__qualname__} has a parameter {name!r}, which is an option of every group call; rename it"
                )
        function.__nonet_method__ = MethodDeclaration(
            dict(markers), collect, idempotent, remember, away=while_offloaded, beside=concurrent
        )  # type: ignore[attr-defined]
        return function

    return declare


def get_declaration(cls: type, name: str) -> MethodDeclaration:
    """Return the declaration of `cls.name`.

    Raises:
        AttributeError: It is not a group method.
    """
    declaration = getattr(getattr(cls, name, None), "__nonet_method__", None)
    if declaration is None:
        methods = sorted(n for n in dir(cls) if hasattr(getattr(cls, n, None), "__nonet_method__"))
        raise AttributeError(
            f"{cls.__name__}.{name} is not a group method (mark it with @nonet.method); "
            f"group methods: {', '.join(methods) or 'none'}"
        )
    return declaration


@cache
def get_signature(function: Callable) -> inspect.Signature:
    """Return the signature of a method without `self`."""
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)


@cache
def list_positional_parameters(function: Callable) -> tuple[str, ...]:
    """Return the names of the parameters that may be given by position, in order, without `self`."""
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = get_signature(function).parameters
    return tuple(name for name, parameter in parameters.items() if parameter.kind in positional)
