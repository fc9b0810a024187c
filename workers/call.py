"""What a rank is told about a call: the method in the task's name, then flat values, and a header where they need one.

Ray resolves references only where they are arguments of their own, so a call's values travel flat. Most calls give one
value a parameter, in order: the name says it all, and a bare call sends nothing (an argument of 100 bytes costs 8 to 20 % of a
call). Otherwise a header, the same for all ranks and pickled once, says how parameters are put together.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from nonet.workers import rows

AS_IS, JOIN, SHARE = "as is", "join", "share"


@dataclass(frozen=True, slots=True)
class Argument:
    """How one parameter is put together.

    how    as is: the next value; join: the next `take` values, joined along rows; share: of `take` chunks whose row
           counts and then whose references follow, this rank's rows, fetching only chunks that hold some of them
    parts  for a dict: how each of its values is put together
    """

    name: str
    how: str = AS_IS
    take: int = 1
    parts: tuple[Argument, ...] = ()


Header = tuple[Argument, ...]


def task_name(role: str, method: str, epoch: int) -> str:
    """What Ray calls the task, in its timeline and dashboard too: "rollout.generate", and "#3" in gang epoch 3."""
    return f"{role}.{method}#{epoch}" if epoch else f"{role}.{method}"


@lru_cache(maxsize=4096)
def named(name: str) -> tuple[str, str, int]:
    """(role, method, epoch) of a task name."""
    text, _, epoch = name.partition("#")
    role, _, method = text.rpartition(".")
    return role, method, int(epoch or 0)


def is_plain(header: Header, parameters: Sequence[str]) -> bool:
    """Whether flat values are the first of these positional parameters in order, so that no header need be sent."""
    return len(header) <= len(parameters) and all(
        argument.how == AS_IS and not argument.parts and argument.name == name
        for argument, name in zip(header, parameters, strict=False)
    )


@lru_cache(maxsize=4096)
def packed(header: Header) -> bytes:
    """The header as bytes, pickled once."""
    return pickle.dumps(header)


@lru_cache(maxsize=4096)
def unpacked(data: bytes) -> Header:
    """The header of those bytes."""
    return pickle.loads(data)


def arguments(
    header: Header, flat: Iterable[Any], rank: int, world: int, fetch: Callable[[str, list[Any]], Any]
) -> dict[str, Any]:
    """Keyword arguments from flat values. `fetch` turns a parameter's name and a list of references into their values."""
    left = iter(flat)
    return {a.name: _assembled(a, left, rank, world, fetch) for a in header}


def _assembled(argument: Argument, left: Iterator[Any], rank: int, world: int, fetch: Callable) -> Any:
    if argument.how == AS_IS:
        if argument.parts:
            return {part.name: _assembled(part, left, rank, world, fetch) for part in argument.parts}
        return next(left)
    if argument.how == JOIN:
        return rows.join([next(left) for _ in range(argument.take)])
    counts = [next(left) for _ in range(argument.take)]
    start, stop = rows.shares(sum(counts), world)[rank]
    return _overlap(next(left), counts, start, stop, partial(fetch, argument.name))


def _overlap(refs: Sequence[Any], counts: Sequence[int], start: int, stop: int, fetch: Callable) -> Any:
    """Rows [start, stop) of chunks laid end to end, fetching only the chunks that have some; no rows: of the first."""
    wanted, begin = [], 0
    for ref, count in zip(refs, counts, strict=True):
        low, high = max(start - begin, 0), min(stop - begin, count)
        if low < high:
            wanted.append((ref, low, high))
        begin += count
    wanted = wanted or [(refs[0], 0, 0)]
    values = fetch([ref for ref, _, _ in wanted])
    parts = [rows.cut(value, low, high) for value, (_, low, high) in zip(values, wanted, strict=True)]
    return parts[0] if len(parts) == 1 else rows.join(parts)
