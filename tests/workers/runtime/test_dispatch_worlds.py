"""Arguments over ranks without Ray: what `spread` sends and `arguments` puts together, for every world and container."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.errors import ConfigError
from nonet.types import Jagged
from nonet.workers.runtime import payload as rows
from nonet.workers.runtime.dispatch import (
    assemble_arguments,
    format_task_name,
    is_plain,
    pack_header,
    parse_task_name,
    spread_argument,
    unpack_header,
)
from nonet.workers.runtime.future import GroupFuture, concat_futures
from nonet.workers.runtime.methods import PerRank, Replicate, Shard

WORLDS = range(1, 9)
ROWS = (*range(10), 13, 16, 31, 32, 33)


def jagged(n: int) -> Jagged:
    lengths = np.arange(n) % 4
    return Jagged(np.arange(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))


CONTAINERS = {
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "array": lambda n: np.arange(2 * n).reshape(n, 2),
    "tensor": lambda n: torch.arange(3 * n).reshape(n, 3),
    "table": lambda n: pa.table({"x": np.arange(n), "y": [str(i) for i in range(n)]}),
    "jagged": jagged,
    "dict": lambda n: {"a": np.arange(n), "b": list(range(n)), "j": jagged(n)},
}


def equal(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, Jagged):
        return equal(left.values, right.values) and equal(left.offsets, right.offsets)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and left == right


def received(value, marker, world, ranks_per_share=1):
    """Return what each rank gets; references are positions in `fetched`, so that fetching can be watched."""
    argument, flats = spread_argument("role.m", "x", value, marker, world, ranks_per_share)
    header = unpack_header(pack_header((argument,)))
    assert len(flats) == world
    return [assemble_arguments(header, flats[rank], rank, world, fetch)["x"] for rank in range(world)]


class Chunk:
    """Stands for an object reference."""

    def __init__(self, value):
        self.value, self.fetched = value, 0


class Answers(GroupFuture):
    """What another group answered, a chunk a rank, with the rows in each."""

    def __init__(self, chunks, counts, ranks_per_share=1):
        self._ranks_per_share, self._actors, self._group = ranks_per_share, chunks, None
        self.refs, self.role, self.method, self.collect, self._count_refs = (
            chunks,
            "other",
            "m",
            "concat",
            counts,
        )
        self.by_rank = True


def fetch(parameter, refs):
    for ref in refs:
        ref.fetched += 1
    return [ref.value for ref in refs]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_sharded_rows_come_back_in_order_without_padding(kind):
    for world in WORLDS:
        for n in ROWS:
            value = CONTAINERS[kind](n)
            parts = received(value, Shard, world)
            counts = [rows.count_rows(part) for part in parts]
            assert sum(counts) == n
            assert max(counts) - min(counts) <= 1
            assert equal(rows.concat_rows(parts), value)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_chunks_by_reference_are_recut_for_any_group_size(kind):
    for before in WORLDS:
        for after in WORLDS:
            for n in (0, 1, 7, 33):
                value = CONTAINERS[kind](n)
                chunks = [Chunk(rows.slice_rows(value, *share)) for share in rows.split_evenly(n, before)]
                counts = tuple(rows.count_rows(chunk.value) for chunk in chunks)
                batch = Answers(chunks, counts)
                if before == after:  # Ray itself would resolve these references
                    _, flats = spread_argument("role.m", "x", batch, Shard, after)
                    assert [flat[0] for flat in flats] == chunks
                    continue
                parts = received(batch, Shard, after)
                assert equal(rows.concat_rows(parts), value)
                assert [rows.count_rows(part) for part in parts] == [
                    b - a for a, b in rows.split_evenly(n, after)
                ]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_ranks_that_compute_the_same_rows_get_the_same_share(kind):
    for shares in (1, 2, 3):
        for n in (0, 1, 7, 33):
            value = CONTAINERS[kind](n)
            parts = received(value, Shard, 2 * shares, ranks_per_share=2)
            assert equal(rows.concat_rows(parts[::2]), value)
            for leader, follower in zip(parts[::2], parts[1::2], strict=True):
                assert equal(leader, follower)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_equal_results_of_ranks_are_passed_on_once(kind):
    """The results of three shares, each computed by two ranks, go to groups of other shares, and are collected."""
    value = CONTAINERS[kind](33)
    chunks = [Chunk(rows.slice_rows(value, *share)) for share in rows.split_evenly(33, 3) for _ in range(2)]
    batch = Answers(chunks, tuple(rows.count_rows(chunk.value) for chunk in chunks), ranks_per_share=2)
    for shares, ranks_per_share in ((2, 2), (1, 2), (2, 1), (4, 1)):
        parts = received(batch, Shard, shares * ranks_per_share, ranks_per_share)
        assert equal(rows.concat_rows(parts[::ranks_per_share]), value)
        assert all(equal(part, parts[i - i % ranks_per_share]) for i, part in enumerate(parts))
    for world, ranks_per_share in ((6, 2), (3, 1)):  # Ray itself would resolve these references
        _, flats = spread_argument("role.m", "x", batch, Shard, world, ranks_per_share)
        assert [flat[0] for flat in flats] == [c for c in chunks[::2] for _ in range(ranks_per_share)]
    assert equal(batch._collect_values([chunk.value for chunk in chunks]), value)
    assert len(concat_futures([batch, batch]).refs) == 6


@pytest.mark.parametrize(("collect", "expected"), [("sum", 5), ("mean", 2.5), ("list", [1, 1, 4, 4])])
def test_equal_results_of_ranks_are_collected_once(collect, expected):
    future = GroupFuture([], None, "r", "m", collect, actors=[], ranks_per_share=2)
    assert future._collect_values([1, 1, 4, 4]) == expected


def test_a_rank_fetches_only_chunks_that_hold_its_rows():
    chunks = [Chunk(list(range(i * 4, i * 4 + 4))) for i in range(4)]
    argument, flats = spread_argument("r.m", "x", Answers(chunks, (4, 4, 4, 4)), Shard, 8)
    got = assemble_arguments((argument,), flats[5], 5, 8, fetch)
    assert got["x"] == [10, 11]
    assert [chunk.fetched for chunk in chunks] == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_replicated_value_is_the_same_for_all(kind):
    value = CONTAINERS[kind](5)
    assert all(equal(part, value) for part in received(value, Replicate, 3))
    assert all(equal(part, value) for part in received(Replicate(value), Shard, 3))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_unmarked_collection_is_an_error_for_every_container(kind):
    with pytest.raises(ConfigError, match="not sharded implicitly"):
        spread_argument("role.m", "x", CONTAINERS[kind](4), None, 4)


@pytest.mark.parametrize("value", [3, 2.5, "text", None, True, b"bytes", np.float32(1)])
def test_scalars_text_and_none_are_replicated(value):
    assert received(value, None, 3) == [value] * 3


def test_per_rank_wants_one_value_a_rank():
    assert received(PerRank(["a", [1]]), None, 2) == ["a", [1]]
    with pytest.raises(ConfigError, match=r"role.m\(x\): PerRank needs 3 values, one for each rank, got 2"):
        spread_argument("role.m", "x", PerRank([1, 2]), None, 3)


def test_values_without_rows_cannot_be_sharded():
    with pytest.raises(ConfigError, match="cannot shard a int"):
        spread_argument("role.m", "x", 3, Shard, 2)
    with pytest.raises(ConfigError, match="different row counts"):
        spread_argument("role.m", "x", {"a": [1], "b": [1, 2]}, Shard, 2)


def test_task_names_tell_role_method_and_epoch():
    assert parse_task_name(format_task_name("rl.reward.hit", "score", 0)) == ("rl.reward.hit", "score", 0)
    assert parse_task_name(format_task_name("trainer", "train", 3)) == ("trainer", "train", 3)


def test_header_is_left_out_only_when_values_are_the_parameters_in_order():
    (a, _), (b, _) = (spread_argument("r.m", name, 1, None, 2) for name in "ab")
    assert is_plain((a, b), ["a", "b", "c"])
    assert not is_plain((b,), ["a", "b"])
    assert not is_plain((a, b), ["a"])  # b can only be given by keyword
    shared, _ = spread_argument("r.m", "a", {"x": Answers([Chunk([1])], (1,))}, Shard, 2)
    assert not is_plain((shared,), ["a"])
