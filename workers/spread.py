"""How the arguments of a group call reach its ranks: cut, copied, handed out, or passed on unfetched.

Every argument gives one `Argument` (the same for all ranks, so that a repeated call pickles no header) and a list of flat
values a rank. A large replicated value is put once; a chunk goes to its rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from nonet.errors import ConfigError
from nonet.types import BatchRef
from nonet.workers import rows
from nonet.workers.call import JOIN, SHARE, Argument
from nonet.workers.future import GroupFuture
from nonet.workers.method import PerRank, Replicate, Shard
from nonet.workers.spans import size_bytes

INLINE_BYTES = 100_000

Spread = tuple[Argument, Sequence[list[Any]]]


def spread(where: str, parameter: str, value: Any, marker: Any, world: int) -> Spread:
    """One parameter's value over `world` ranks. Raises ConfigError for a collection nobody has marked."""
    if isinstance(value, Shard | Replicate | PerRank):
        marker, value = type(value), value.value
    if isinstance(value, GroupFuture):
        return _pass_on(where, parameter, value, marker, world)
    if isinstance(value, BatchRef):
        return _batch(where, parameter, value, marker, world)
    if isinstance(value, Mapping) and any(isinstance(part, GroupFuture) for part in value.values()):
        return _dict(parameter, [spread(where, name, part, marker, world) for name, part in value.items()])
    if marker is Shard:
        chunks = [[rows.cut(value, *share)] for share in rows.shares(rows.count(value), world)]
    elif marker is PerRank:
        chunks = [[chunk] for chunk in value]
        if len(chunks) != world:
            raise ConfigError(
                f"{where}({parameter}): PerRank wants {world} values, one a rank, got {len(chunks)}"
            )
    elif marker is Replicate or not rows.is_collection(value):
        chunks = [[put_once(value, world)]] * world
    else:
        raise ConfigError(
            f"{where}({parameter}): a {type(value).__name__} is not sharded by guess; "
            "mark it in @nonet.method or at the call: "
            f"Shard (cut along rows), Replicate (same for all ranks) or PerRank (one value a rank)"
        )
    return Argument(parameter), chunks


def put_once(value: Any, world: int) -> Any:
    """The value, or one reference to it where it is large and more than one rank reads it."""
    return ray.put(value) if world > 1 and _weight(value) > INLINE_BYTES else value


def _weight(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict) and len(value) > 1000:
        return INLINE_BYTES + 1  # to weigh each of thousands of small objects would cost more than one put
    return size_bytes(value)


def _dict(parameter: str, parts: Sequence[Spread]) -> Spread:
    """A dict whose values are spread each for itself."""
    flats = [
        [value for mine in by_rank for value in mine]
        for by_rank in zip(*(flat for _, flat in parts), strict=True)
    ]
    return Argument(parameter, parts=tuple(argument for argument, _ in parts)), flats


def _pass_on(where: str, parameter: str, future: GroupFuture, marker: Any, world: int) -> Spread:
    refs, origin = future.refs, f"{future.role}.{future.method}"
    if marker is Shard and future.collect != "concat":
        raise ConfigError(
            f"{where}({parameter}): only results collected by 'concat' can be sharded; "
            f"{origin} collects by {future.collect!r}"
        )
    if marker in (Shard, PerRank) and len(refs) == world:
        return Argument(parameter), [[ref] for ref in refs]
    if marker is PerRank:
        raise ConfigError(f"{where}({parameter}): PerRank wants {world} results, {origin} has {len(refs)}")
    if marker is Shard:
        return _share(parameter, future.counts(), refs, world)
    if future.collect == "first" or (future.collect == "concat" and len(refs) == 1):
        return Argument(parameter), [[refs[0]]] * world
    if future.collect == "concat":
        return Argument(parameter, JOIN, len(refs)), [list(refs)] * world
    raise ConfigError(
        f"{where}({parameter}): {origin} collects by {future.collect!r}; "
        "get() it first, or collect by 'concat' or 'first'"
    )


def _batch(where: str, parameter: str, batch: BatchRef, marker: Any, world: int) -> Spread:
    """A BatchRef as a dict of its fields; receivers fetch their own chunks and slices of chunks."""
    if marker not in (Shard, Replicate):
        raise ConfigError(f"{where}({parameter}): a BatchRef takes Shard or Replicate")
    parts = []
    for name, refs in batch.fields.items():
        if marker is Shard and len(refs) == world:
            parts.append((Argument(name), [[ref] for ref in refs]))
        elif marker is Shard:
            parts.append(_share(name, batch.rows, refs, world))
        else:
            parts.append((Argument(name, JOIN, len(refs)), [list(refs)] * world))
    return _dict(parameter, parts)


def _share(parameter: str, counts: Sequence[Any], refs: Sequence[Any], world: int) -> Spread:
    """Chunks by reference with their row counts; in a list, so that Ray fetches none of them for anybody."""
    return Argument(parameter, SHARE, len(refs)), [[*counts, list(refs)]] * world
