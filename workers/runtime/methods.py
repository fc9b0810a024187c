"""How a group method's arguments reach its ranks, declared once.

    @nonet.method(rows=nonet.Shard, scale=nonet.Replicate, collect="concat")
    def double(self, rows, scale): ...

Nothing is sharded by guess: a list, dict, array, tensor or table without a marker is an error that says which to choose.
Scalars, text, None and handles are replicated. `timeout_s` and `retries` belong to every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from nonet.errors import ConfigError

Collect = Literal["concat", "list", "first", "sum", "mean", "stream"]
CALL_OPTIONS = ("timeout_s", "retries")


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along rows into contiguous, nearly equal chunks, one a rank, in rank order."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same value for every rank; put once when it is large."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """A sequence whose i-th value goes to rank i."""

    value: Any


Marker = type[Shard] | type[Replicate] | type[PerRank]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class MethodDeclaration:
    """What `@method` declared: markers by parameter name, and how results are collected."""

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
    """Declare a group method.

    collect      concat | list | first | sum | mean | stream (a method that yields)
    idempotent   running it twice does no harm: calls may ask for `retries`
    remember     a worker that was restarted hears the last such call again before it is admitted
    away         it touches no buffer of the device, so it runs while they wait in host memory too
    beside       several calls run at once, in threads of their own and in no order, also beside other methods

    Raises ConfigError on an unknown word, and on a parameter named like a call option (timeout_s, retries).
    """
    if collect not in get_args(Collect):
        raise ConfigError(f"collect={collect!r} is not one of {', '.join(get_args(Collect))}")

    def declare(function: _F) -> _F:
        known = inspect.signature(function).parameters
        for name in markers:
            if name not in known:
                raise ConfigError(
                    f"@method marks {name!r}, which {function.__qualname__} has not; it has {', '.join(known)}"
                )
        for name in CALL_OPTIONS:
            if name in known:
                raise ConfigError(
                    f"{function.__qualname__} has a parameter {name!r}, which every group call has: name it otherwise"
                )
        function.__nonet_method__ = MethodDeclaration(
            dict(markers), collect, idempotent, remember, while_offloaded, concurrent
        )  # type: ignore[attr-defined]
        return function

    return declare


def get_declaration(cls: type, name: str) -> MethodDeclaration:
    """The declaration of `cls.name`. Raises AttributeError when it is no group method."""
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
    """The signature without `self`."""
    whole = inspect.signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


@cache
def list_positional_parameters(function: Callable) -> tuple[str, ...]:
    """Names of the parameters that may be given by position, in order, `self` left out."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(name for name, known in get_signature(function).parameters.items() if known.kind in kinds)
