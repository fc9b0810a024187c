"""Serialisation of group calls: how the arguments of a call are divided among its ranks, and how a rank assembles them.

Ray resolves a reference only if it is a top-level argument of a task, so the values of a call are sent as a flat list
of arguments (the flat values). Most calls have one value per parameter, in the order of the parameters. Then the name
of the task says enough, and no header is sent, since even an argument of 100 bytes makes a call 8 to 20 % slower.
Otherwise a header, which is the same for all ranks and pickled once, describes how the parameters are assembled.

The value of every parameter becomes one `Argument`, the same for all ranks, and a list of flat values for each rank.
The value is sharded, replicated, distributed by rank, or passed on by reference. A large replicated value is put into
the object store once; a chunk is sent only to its rank. Where several neighbouring ranks compute the same share of the rows
(tensor parallelism), each of them gets the chunk of the share.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import ray

from nonet.errors import ConfigError
from nonet.workers.runtime.future import GroupFuture
from nonet.workers.runtime.methods import PerRank, Replicate, Shard
from nonet.workers.runtime.payload import concat_rows, count_rows, is_collection, slice_rows, split_evenly
from nonet.workers.runtime.timeline import count_bytes

AS_IS, JOIN, SHARE = "as is", "join", "share"
"""How a rank assembles a parameter (`Argument.how`)."""


@dataclass(frozen=True, slots=True)
class Argument:
    """How one parameter is assembled.

    Attributes:
        name: Name of the parameter.
        how: "as is" takes the next flat value. "join" concatenates the next `take` values along rows. "share" takes
            the row counts of `take` chunks and then a list of their references, and fetches only the chunks that
            contain rows of this rank's share.
        take: Number of values or chunks.
        ranks_per_share: Number of neighbouring ranks that fetch the same rows.
        parts: For a dict, how each of its values is assembled.
    """

    name: str
    how: str = AS_IS
    take: int = 1
    ranks_per_share: int = 1
    parts: tuple[Argument, ...] = ()


Header = tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class CallMessage:
    """One group call as it is sent.

    Attributes:
        role: Role that is called.
        method: Name of the method.
        epoch: Gang epoch of the call.
        header: How parameters are assembled; None if the flat values are the first parameters in order.
        flats: The flat values of each rank.
        beside: Whether the call may run concurrently with other calls of its ranks, in any order.
    """

    role: str
    method: str
    epoch: int
    header: Header | None
    flats: Sequence[Sequence[Any]]
    beside: bool = False


def format_task_name(role: str, method: str, epoch: int) -> str:
    """Return the name of a call's Ray task: "rollout.generate", or "rollout.generate#3" in gang epoch 3."""
    return f"{role}.{method}#{epoch}" if epoch else f"{role}.{method}"


@lru_cache(maxsize=4096)
def parse_task_name(task_name: str) -> tuple[str, str, int]:
    """Split a task name into (role, method, epoch)."""
    text, _, epoch = task_name.partition("#")
    role, _, method = text.rpartition(".")
    return role, method, int(epoch or 0)


def is_plain(header: Header, parameters: Sequence[str]) -> bool:
    """Return whether flat values are the first positional parameters in order, so that no header is needed."""
    return len(header) <= len(parameters) and all(
        argument.how == AS_IS and not argument.parts and argument.name == name
        for argument, name in zip(header, parameters, strict=False)
    )


@lru_cache(maxsize=4096)
def pack_header(header: Header) -> bytes:
    """Pickle a header; cached, so equal headers are pickled once."""
    return pickle.dumps(header)


@lru_cache(maxsize=4096)
def unpack_header(data: bytes) -> Header:
    """Unpickle a header."""
    return pickle.loads(data)


def assemble_arguments(
    header: Header, flat: Iterable[Any], rank: int, world: int, fetch: Callable[[str, list[Any]], Any]
) -> dict[str, Any]:
    """Assemble the keyword arguments of a call from its flat values.

    Args:
        header: How each parameter is assembled.
        flat: The flat values of this rank.
        rank: This rank.
        world: Number of ranks.
        fetch: Returns the values of references, given the name of the parameter and the references.
    """
    remaining = iter(flat)
    return {argument.name: _assemble_argument(argument, remaining, rank, world, fetch) for argument in header}


def _assemble_argument(
    argument: Argument, remaining: Iterator[Any], rank: int, world: int, fetch: Callable
) -> Any:
    """Assemble one parameter from the next flat values, which are taken from `remaining`."""
    if argument.how == AS_IS:
        if argument.parts:
            return {
                part.name: _assemble_argument(part, remaining, rank, world, fetch) for part in argument.parts
            }
        return next(remaining)
    if argument.how == JOIN:
        return concat_rows([next(remaining) for _ in range(argument.take)])
    row_counts = [next(remaining) for _ in range(argument.take)]
    n_ranks = argument.ranks_per_share
    start, stop = split_evenly(sum(row_counts), world // n_ranks)[rank // n_ranks]
    return _fetch_rows(next(remaining), row_counts, start, stop, partial(fetch, argument.name))


def _fetch_rows(
    refs: Sequence[Any], row_counts: Sequence[int], start: int, stop: int, fetch: Callable
) -> Any:
    """Return the rows [start, stop) of concatenated chunks, fetching only chunks that contain some of them.

    An empty range gives the first chunk without its rows, so that the type is right.
    """
    pieces, chunk_start = [], 0
    for ref, row_count in zip(refs, row_counts, strict=True):
        low, high = max(start - chunk_start, 0), min(stop - chunk_start, row_count)
        if low < high:
            pieces.append((ref, low, high))
        chunk_start += row_count
    pieces = pieces or [(refs[0], 0, 0)]
    chunks = fetch([ref for ref, _, _ in pieces])
    parts = [slice_rows(chunk, low, high) for chunk, (_, low, high) in zip(chunks, pieces, strict=True)]
    return parts[0] if len(parts) == 1 else concat_rows(parts)


INLINE_BYTES = (
    100_000  # Larger values go into the object store; Ray itself sends up to 100 KB inline with a task.
)

Spread = tuple[Argument, Sequence[list[Any]]]
"""How one parameter is assembled, and its flat values for each rank."""


def spread_argument(
    call_name: str, parameter: str, value: Any, marker: Any, world: int, ranks_per_share: int = 1
) -> Spread:
    """Divide the value of one parameter among ranks.

    Args:
        call_name: `role.method`, for messages.
        parameter: Name of the parameter.
        value: Its value, which may be wrapped in a marker or be the future of another group.
        marker: The marker that the method declares for the parameter, None if it declares none.
        world: Number of ranks.
        ranks_per_share: Number of neighbouring ranks that get the same share of a sharded value.

    Returns:
        How the parameter is assembled, and its flat values for each rank.

    Raises:
        ConfigError: The value is a collection without a marker, or has the wrong number of parts.
    """
    if isinstance(value, Shard | Replicate | PerRank):
        marker, value = type(value), value.value
    if isinstance(value, GroupFuture):
        return _spread_future(call_name, parameter, value, marker, world, ranks_per_share)
    if isinstance(value, Mapping) and any(isinstance(part, GroupFuture) for part in value.values()):
        return _spread_dict(
            parameter,
            [
                spread_argument(call_name, name, part, marker, world, ranks_per_share)
                for name, part in value.items()
            ],
        )
    if marker is Shard:
        ranges = split_evenly(count_rows(value), world // ranks_per_share)
        chunks = [put_once(slice_rows(value, start, stop), ranks_per_share) for start, stop in ranges]
        flats = [[chunk] for chunk in chunks for _ in range(ranks_per_share)]
    elif marker is PerRank:
        flats = [[rank_value] for rank_value in value]
        if len(flats) != world:
            raise ConfigError(
                f"{call_name}({parameter}): PerRank needs {world} values, one for each rank, got {len(flats)}"
            )
    elif marker is Replicate or not is_collection(value):
        flats = [[put_once(value, world)]] * world
    else:
        raise ConfigError(
            f"{call_name}({parameter}): a {type(value).__name__} is not sharded implicitly; "
            "mark it in @nonet.method or at the call: "
            f"Shard (cut along rows), Replicate (same for all ranks) or PerRank (one value for each rank)"
        )
    return Argument(parameter), flats


def put_once(value: Any, world: int) -> Any:
    """Put a large value into the object store if there are several ranks, and return its reference; else return the value."""
    return ray.put(value) if world > 1 and _estimate_bytes(value) > INLINE_BYTES else value


def _estimate_bytes(value: Any) -> int:
    """Estimate the bytes of a value; a collection of more than 1,000 objects counts as large."""
    if isinstance(value, str | list | tuple | dict) and len(value) > 1000:
        return INLINE_BYTES + 1  # Measuring each of thousands of small objects would cost more than one put.
    return count_bytes(value)


def _spread_dict(parameter: str, spreads: Sequence[Spread]) -> Spread:
    """Combine the divided values of a dict into one argument."""
    flats = [
        [value for part_values in parts_of_rank for value in part_values]
        for parts_of_rank in zip(*(flats for _, flats in spreads), strict=True)
    ]
    return Argument(parameter, parts=tuple(argument for argument, _ in spreads)), flats


def _spread_future(
    call_name: str, parameter: str, future: GroupFuture, marker: Any, world: int, ranks_per_share: int
) -> Spread:
    """Divide the results of another group by reference.

    Each rank gets the result of the same share or rank, or all results, or the references and row counts by which it fetches
    its share of the rows.
    """
    refs = future.refs if marker is PerRank else future.select_shares(future.refs)
    origin, shares = f"{future.role}.{future.method}", world // ranks_per_share
    if marker is Shard and future.collect != "concat":
        raise ConfigError(
            f"{call_name}({parameter}): only results collected by 'concat' can be sharded; "
            f"{origin} collects by {future.collect!r}"
        )
    if marker is PerRank and len(refs) == world and (future.by_rank or world == 1):
        return Argument(parameter), [[ref] for ref in refs]
    if marker is Shard and len(refs) == shares and (future.by_rank or shares == 1):
        return Argument(parameter), [[ref] for ref in refs for _ in range(ranks_per_share)]
    if marker is PerRank:
        raise ConfigError(
            f"{call_name}({parameter}): PerRank needs {world} results, {origin} has {len(refs)}"
        )
    if marker is Shard:
        count_refs = future.select_shares(future.request_row_counts())
        argument = Argument(parameter, SHARE, take=len(refs), ranks_per_share=ranks_per_share)
        # Ray resolves the references to the row counts, but not those inside the list.
        return argument, [[*count_refs, list(refs)]] * world
    if future.collect == "first" or (future.collect == "concat" and len(refs) == 1):
        return Argument(parameter), [[refs[0]]] * world
    if future.collect == "concat":
        return Argument(parameter, JOIN, take=len(refs)), [list(refs)] * world
    raise ConfigError(
        f"{call_name}({parameter}): {origin} collects by {future.collect!r}; "
        "get() it first, or collect by 'concat' or 'first'"
    )
