import numpy as np
import pytest
import torch

from nonet.embedding.exchange.routes import make_route, route_with_numpy, select_router
from nonet.embedding.slices import SLICES, SliceMap, splitmix64

ROUTERS = [route_with_numpy, select_router()]
ODD_KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 0, -1])


def batches():
    source = np.random.default_rng(5)
    yield np.empty(0, dtype=np.int64)
    yield np.array([7])
    yield ODD_KEYS
    yield np.zeros(1000, dtype=np.int64)
    yield np.arange(5000)
    for size in (2, 33, 700, 9000):
        yield source.integers(-(2**63), 2**63 - 1, size)
        yield source.zipf(1.1, size)
    yield one_cell(300)


def one_cell(count):
    """Keys whose hash shares its low 16 bits: the same cell for a table of any size here."""
    hashes = (np.arange(count, dtype=np.uint64) << np.uint64(16)) | np.uint64(0x1234)
    keys = inverse_splitmix64(hashes)
    assert np.array_equal(splitmix64(keys), hashes)
    return np.concatenate([keys, keys[::3]])


def inverse_splitmix64(hashes):
    def unshift(values, by):
        undone = values.copy()
        for _ in range(64 // by + 1):
            undone = values ^ (undone >> np.uint64(by))
        return undone

    def inverse(odd):
        return np.uint64(pow(odd, -1, 1 << 64))

    mixed = unshift(hashes, 31) * inverse(0x94D049BB133111EB)
    mixed = unshift(mixed, 27) * inverse(0xBF58476D1CE4E5B9)
    return (unshift(mixed, 30) - np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


@pytest.mark.parametrize("router", ROUTERS, ids=["numpy", "best"])
@pytest.mark.parametrize("shards", [1, 2, 7, 300])
def test_a_route_holds_each_key_once_at_its_owner_and_leads_every_asked_key_back(router, shards):
    slices = SliceMap(shards)
    for keys in batches():
        found = make_route(keys, slices, world=shards + 3, first=2, router=router)
        assert np.array_equal(found.keys[found.place], keys)
        assert len(set(found.keys.tolist())) == len(found.keys) == len(set(keys.tolist()))
        assert sum(found.counts) == len(found.keys)
        assert found.counts[:2] == [0, 0]
        assert found.counts[-1] == 0
        owners = np.repeat(np.arange(shards + 3) - 2, found.counts)
        assert np.array_equal(slices.find_owners(found.keys), owners)


def test_both_routers_give_the_same_route():
    if select_router() is route_with_numpy:
        pytest.skip("no C++ compiler on this machine")
    for keys in batches():
        for ours, theirs in zip(
            route_with_numpy(keys, SliceMap(5).owners, 5),
            select_router()(keys, SliceMap(5).owners, 5),
            strict=True,
        ):
            assert np.array_equal(ours, theirs)


def test_gradients_of_equal_keys_are_summed_in_position_order():
    source = np.random.default_rng(3)
    keys = source.integers(0, 20, 500)
    grads = torch.from_numpy(
        source.standard_normal((500, 3)).astype(np.float32) * 10.0 ** source.integers(-4, 5, (500, 1))
    )
    grads = grads.to(torch.float32)
    found = make_route(keys, SliceMap(3), 3)
    sums = {int(key): np.zeros(3, dtype=np.float32) for key in keys}
    for key, grad in zip(keys.tolist(), grads.numpy(), strict=True):
        sums[key] += grad
    reduced = found.sum_gradients(grads)
    assert all(
        np.array_equal(row, sums[key]) for key, row in zip(found.keys.tolist(), reduced.numpy(), strict=True)
    )


def test_a_map_is_edited_by_moves_and_carries_a_version():
    two, three = SliceMap(5, SliceMap(2).owners), SliceMap(5, SliceMap(3).owners)
    moves = two.plan_moves(three, max_slices=5000)
    assert max(move.stop - move.start for move in moves) <= 5000
    moved = two.apply_moves(moves)
    assert np.array_equal(moved.owners, three.owners)
    assert (two.version, moved.version) == (0, 1)
    # 2 -> 3: shard 0 keeps two thirds of its half, so does shard 1; only what must move does.
    assert sum(move.stop - move.start for move in moves) == (two.owners != three.owners).sum()
    half = two.apply_moves(moves[:1])
    assert sum(len(block) for shard in range(5) for block in half.get_ranges(shard)) == SLICES


@pytest.mark.parametrize("router", ROUTERS)
def test_some_of_a_routes_keys_go_where_they_would_alone(router):
    slices = SliceMap(5)
    for keys in batches():
        whole = make_route(keys, slices, 6, 1, router)
        chosen = np.random.default_rng(3).random(len(whole.keys)) < 0.4
        some, alone = whole.select_keys(chosen), make_route(whole.keys[chosen], slices, 6, 1, router)
        assert some.keys.tolist() == alone.keys.tolist()
        assert some.counts == alone.counts
        assert some.place.tolist() == list(range(len(some.keys)))


@pytest.mark.parametrize("router", ROUTERS, ids=["numpy", "best"])
def test_every_asked_key_gets_its_own_row_back(router):
    keys = np.array([30, 10, 30, 20, 10])
    found = make_route(keys, SliceMap(3), world=3, first=0, router=router)
    rows = torch.from_numpy(found.keys).float()[:, None] / 10
    assert found.spread_rows(rows)[:, 0].tolist() == [3, 1, 3, 2, 1]
    assert found.move_to_end(0, 1, unchanged=False).spread_rows(torch.cat([rows[1:], rows[:1]]))[
        :, 0
    ].tolist() == [
        3,
        1,
        3,
        2,
        1,
    ]
