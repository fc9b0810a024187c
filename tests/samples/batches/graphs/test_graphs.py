"""Neighbours of users and items as of a time: never an edge of the row itself or of a later one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.embedding.modules import EmbeddingBagCollection, TableConfig
from nonet.embedding.tables import TableSpec
from nonet.errors import DataError
from nonet.ranges import expand_ranges
from nonet.samples.batches import CLICK_FEATURES, ClickRows
from nonet.samples.batches.graphs import Edges, Graph, Graphs, History, list_graph_features
from nonet.samples.batches.graphs.adjacency import WEIGHT_1
from nonet.samples.sequences import build_sequences
from nonet.samples.tables import compute_keys
from nonet.types import Jagged

USERS, ITEMS, LAST = 30, 40, 400
OPTIONS = {
    "near": Graph(edges="item-item", window=3, k=6, newest=12, half_life=100),
    "fans": Graph(edges="item-user", k=4),
    "mine": Graph(edges="user-item", k=5, newest=8, half_life=50),
}
FEATURES = list_graph_features(OPTIONS)


def make_log(seed=0, events=1200):
    draw = np.random.default_rng(seed)
    return pa.table(
        {
            "user_id": np.r_[np.arange(USERS), draw.integers(0, USERS, events)],
            "item_id": np.r_[np.arange(USERS), draw.integers(0, ITEMS, events)],
            "timestamp": np.r_[np.zeros(USERS, np.int64), draw.integers(0, LAST, events)],
            "rating": draw.integers(1, 6, USERS + events).astype(np.float32),
        }
    )


ITEM_TABLE = pa.table(
    {
        "item_id": np.arange(ITEMS),
        "title": [f"film {i}" for i in range(ITEMS)],
        "categories": [["all"]] * ITEMS,
    }
)


def build(log, options=OPTIONS, tables=(), seed=7):
    seq, items = build_sequences(
        log, ITEM_TABLE, split={"use": "leave_last_out", "test": 1}, targets={"train": "rating >= 4"}
    )
    return Graphs.build(options, seq, len(items), dict(tables), seed).attach_to(seq), items


def make_rows(log, features=FEATURES, **options):
    seq, items = build(log, **options)
    return ClickRows.from_labels(seq, items, seq.targets["train"], features, 20)


def bits(rows, index):
    """Return the bags of rows by the user, item and time of the row."""
    found, seq = rows.batch(index), rows.seq
    return [
        (
            seq.user_id[seq.user[event]],
            int(seq.item[event]),
            int(seq.time[event]),
            *((name, tuple(bag[row].tolist())) for name, bag in found.items()),
        )
        for row, event in enumerate(index.tolist())
    ]


def test_items_within_the_window_of_a_history_are_neighbours_from_the_later_event_on():
    rows = make_rows(make_log(), ("near",), options={"near": Graph(edges="item-item", window=3)})
    seq, edges = rows.seq, rows.seq.graphs.graphs["near"].edges.list_edges()
    expected = []
    for begin, end in zip(seq.offsets[:-1], seq.offsets[1:], strict=True):
        for later in range(begin, end):
            for earlier in range(max(begin, later - 3), later):
                a, b, time = int(seq.item[earlier]), int(seq.item[later]), int(seq.time[later])
                weight = WEIGHT_1 // (later - earlier)
                expected += [(a, b, time, weight), (b, a, time, weight)] if a != b else []
    found = zip(
        edges.source.tolist(), edges.target.tolist(), edges.time.tolist(), edges.weight.tolist(), strict=True
    )
    assert sorted(found) == sorted(expected)


def test_counts_are_those_of_the_events_that_are_older_than_the_row():
    rows = make_rows(make_log())
    seq, index = rows.seq, np.arange(len(rows.label))
    found = seq.graphs.find_neighbours(FEATURES, seq.user, seq.item, seq.time)
    for row in index.tolist():
        older = seq.time < seq.time[row]
        assert found["fans"].one_hop[row] == (older & (seq.item == seq.item[row])).sum()
        assert found["mine"].one_hop[row] == (older & (seq.user == seq.user[row])).sum()
        for name, node in (("fans", seq.user), ("mine", seq.item)):
            drawn = found[name].drawn[row]
            assert found[name].two_hops[row] == sum((older & (node == each)).sum() for each in drawn.tolist())
    bags = rows.batch(index)
    logs = 1 + np.ceil(np.log2(found["near"].two_hops + 1.0)).astype(np.int64)
    assert bags["near_2hop"].values.tolist() == compute_keys("near_2hop", logs).tolist()
    assert bags["near"].values.tolist() == seq.item_key[found["near"].drawn.values].tolist()
    assert bags["fans"].values.tolist() == seq.user_key[found["fans"].drawn.values].tolist()


@pytest.mark.parametrize("moment", [90, 200, 333])
def test_no_row_before_a_moment_changes_if_all_later_events_do(moment):
    """The leak test: ids and ratings of all events from the moment on are replaced, and some events are added."""
    log, features = make_log(), (*CLICK_FEATURES, *FEATURES)
    time = log["timestamp"].to_numpy()
    is_later, draw = time >= moment, np.random.default_rng(1)
    changed = {
        "user_id": np.where(is_later, draw.integers(0, USERS, len(log)), log["user_id"]),
        "item_id": np.where(is_later, draw.integers(0, ITEMS, len(log)), log["item_id"]),
        "timestamp": np.where(is_later, draw.integers(moment, 2 * LAST, len(log)), time),
        "rating": np.where(is_later, 6 - log["rating"].to_numpy(), log["rating"]).astype(np.float32),
    }
    more = make_log(seed=2, events=200)
    more = more.set_column(2, "timestamp", pa.array(draw.integers(moment, LAST, len(more))))
    other_log = pa.concat_tables([pa.table(changed), more])
    before, after = make_rows(log, features), make_rows(other_log, features)
    at_or_before = [np.flatnonzero(np.asarray(rows.seq.time) <= moment - 1) for rows in (before, after)]
    assert sorted(bits(before, at_or_before[0])) == sorted(bits(after, at_or_before[1]))
    assert len(at_or_before[0]) > 200
    later = [np.flatnonzero(np.asarray(rows.seq.time) > moment + 50) for rows in (before, after)]
    assert sorted(bits(before, later[0])) != sorted(bits(after, later[1]))


class IdRows:
    """A source of rows [1] that have the index of their item, plus one."""

    def __init__(self, keys):
        self.order = np.argsort(keys)
        self.sorted_keys = np.asarray(keys)[self.order]

    def pull(self, table, keys, *, train=True):
        index = self.order[np.searchsorted(self.sorted_keys, keys.numpy())]
        return torch.from_numpy(index + 1.0).float()[:, None]


def make_sequences(rows, index, length):
    """Return the items of `near` [P, L] as a model with sequences gets them, and their mask."""
    spec = TableSpec(dim=1)
    source = IdRows(rows.seq.item_key)
    bags = EmbeddingBagCollection({"item": TableConfig(spec, ("near",))}, source, {"near": length})
    found = bags.eval()({"near": rows.batch(index)["near"]})
    return found["near"][..., 0].long().numpy() - 1, found["near_mask"].numpy() > 0


@pytest.mark.parametrize("length", [4, 9])  # below and above the number of drawn neighbours
def test_a_sequence_of_neighbours_has_the_newest_known_ones_oldest_first_and_none_of_later_events(length):
    rows = make_rows(make_log(), ("near",))
    seq, index = rows.seq, np.arange(len(rows.label))
    item, mask = make_sequences(rows, index, length)
    edges = seq.graphs.graphs["near"].edges.list_edges()
    known = {}
    for a, b, time in zip(edges.source.tolist(), edges.target.tolist(), edges.time.tolist(), strict=True):
        known.setdefault((a, b), []).append(time)
    full = 0
    for row in index.tolist():
        now, center = int(seq.time[row]), int(seq.item[row])
        times = [known[center, each] for each in item[row, mask[row]].tolist()]
        assert all(min(each) < now for each in times), "an edge of each neighbour is older than the row"
        newest = [max(time for time in each if time < now) for each in times]
        drawn = [min(time for time in each if time < now) for each in times]
        # One edge of each neighbour was drawn, so some non-decreasing choice of their times exists.
        latest = -1
        for first, last in zip(drawn, newest, strict=True):
            latest = max(latest, first)
            assert latest <= last
        assert mask[row].tolist() == sorted(mask[row].tolist(), reverse=True), "the padding comes last"
        assert (item[row, ~mask[row]] == -1).all()
        full += mask[row].sum() == min(length, OPTIONS["near"].k)
    assert full > 500


@pytest.mark.parametrize("moment", [90, 333])
def test_no_sequence_before_a_moment_changes_if_all_later_events_do(moment):
    log = make_log()
    time = log["timestamp"].to_numpy()
    draw = np.random.default_rng(1)
    items = np.where(time >= moment, draw.integers(0, ITEMS, len(log)), log["item_id"])
    changed = log.set_column(1, "item_id", pa.array(items))
    before, after = (make_rows(each, ("near",)) for each in (log, changed))
    found = []
    for rows in (before, after):
        index = np.flatnonzero(np.asarray(rows.seq.time) < moment)
        order = np.lexsort((np.asarray(rows.seq.item)[index], rows.seq.time[index], rows.seq.user[index]))
        found.append(make_sequences(rows, index[order], 4))
    assert len(found[0][0]) > 200
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    whole = [make_sequences(rows, np.arange(len(rows.label)), 4)[0] for rows in (before, after)]
    assert not np.array_equal(*whole)


def test_a_row_sees_no_edge_of_its_own_second():
    log = make_log()
    same_second = log.set_column(2, "timestamp", pa.array(np.full(len(log), 5)))
    rows = make_rows(same_second)
    found = rows.batch(np.arange(len(rows.label)))
    assert all(len(found[name].values) == 0 for name in OPTIONS)
    assert set(found["near_1hop"].values.tolist()) == set(compute_keys("near_1hop", np.array([1])).tolist())


def test_every_division_into_batches_gives_the_same_bits():
    rows = make_rows(make_log())
    index = np.arange(len(rows.label))
    whole = bits(rows, index)
    assert [row for part in np.array_split(index, 7) for row in bits(rows, part)] == whole
    assert bits(rows, index[::-1])[::-1] == whole


def test_chunks_of_rows_are_drawn_as_one(monkeypatch):
    rows = make_rows(make_log())
    index = np.arange(len(rows.label))
    whole = bits(rows, index)
    monkeypatch.setattr("nonet.samples.batches.graphs.graphs._CHUNK_CANDIDATES", 500)
    assert bits(rows, index) == whole


def test_draws_depend_on_the_seed_and_on_ids_instead_of_indices():
    log = make_log()
    rows = make_rows(log)
    index = np.arange(len(rows.label))
    assert bits(make_rows(log, seed=8), index) != bits(rows, index)
    strangers = pa.table(
        {
            "user_id": np.arange(-9, 0),
            "item_id": np.zeros(9, np.int64),
            "timestamp": np.full(9, 10 * LAST),
            "rating": np.ones(9, np.float32),
        }
    )
    more = make_rows(pa.concat_tables([strangers, log]))
    first = 9  # the users -9 to -1 come first
    assert {row[0] for row in bits(more, np.arange(first))} == set(range(-9, 0))
    assert bits(more, index + first) == bits(rows, index)


def test_events_of_a_request_are_edges_as_if_the_log_had_them():
    """The newest events of each user, which the log lacks, come with a request; the row is that of the whole log."""
    log = make_log()
    whole = make_rows(log).seq
    order = np.lexsort((np.asarray(whole.time), whole.user))
    assert np.array_equal(order, np.arange(len(order)))
    for user in range(0, USERS, 3):
        begin, end = whole.offsets[user], whole.offsets[user + 1]
        cut = int(whole.time[end - 4])
        is_missing = (whole.user == user) & (whole.time >= cut)
        kept = np.flatnonzero(~is_missing)
        log_of_model = pa.table(
            {
                "user_id": whole.user_id[whole.user[kept]],
                "item_id": np.asarray(whole.item)[kept],
                "timestamp": np.asarray(whole.time)[kept],
                "rating": np.ones(len(kept), np.float32),
            }
        )
        model = build(log_of_model)[0].graphs
        item = np.arange(ITEMS)
        now = np.full(ITEMS, int(whole.time[end - 1]) + 1)
        users = np.full(ITEMS, user)
        past, offsets = expand_ranges(np.array([begin]), np.array([end]))
        context = np.zeros(ITEMS, np.int64)
        history = History(np.array([user]), Jagged(whole.item[past], offsets), whole.time[past], context)
        found = model.find_neighbours(FEATURES, users, item, now, history)
        expected = whole.graphs.find_neighbours(FEATURES, users, item, now)
        without = model.find_neighbours(FEATURES, users, item, now)
        for name in OPTIONS:
            assert found[name].drawn.values.tolist() == expected[name].drawn.values.tolist()
            assert found[name].one_hop.tolist() == expected[name].one_hop.tolist()
            assert found[name].two_hops.tolist() == expected[name].two_hops.tolist()
            assert without[name].one_hop.tolist() != expected[name].one_hop.tolist()


def test_a_node_without_new_edges_keeps_its_neighbours():
    graphs = build(make_log())[0].graphs
    item, user = np.arange(ITEMS), np.zeros(ITEMS, np.int64)
    first, later = (
        graphs.find_neighbours(FEATURES, user, item, np.full(ITEMS, time)) for time in (LAST + 1, LAST + 900)
    )
    assert first["fans"].drawn.values.tolist() == later["fans"].drawn.values.tolist()
    # Weights of `near` have decayed by a factor of 500, in steps of a sixteenth of the half-life.
    same = (first["near"].drawn.values == later["near"].drawn.values).mean()
    assert same > 0.8


def test_a_request_sees_the_events_of_no_other_one_and_none_at_its_time():
    graphs = build(make_log())[0].graphs
    past = Jagged(np.array([3, 4, 5, 6]), np.array([0, 2, 4]))
    time = np.array([LAST + 1, LAST + 9, LAST + 1, LAST + 2])
    history = History(np.array([-1, -1]), past, time, np.array([0, 1]))
    unknown = np.array([-1, -1])
    found = graphs.find_neighbours(
        FEATURES, unknown, np.array([3, 3]), np.array([LAST + 9, LAST + 9]), history
    )
    assert [set(found["mine"].drawn[row].tolist()) for row in (0, 1)] == [{3}, {5, 6}]
    assert found["mine"].one_hop.tolist() == [1, 2]


def test_graphs_that_are_written_part_by_part_are_those_in_memory(tmp_path, monkeypatch):
    rows = make_rows(make_log())
    bare = replace(rows.seq, graphs=None)
    monkeypatch.setattr("nonet.samples.batches.graphs.log_edges._PART_EVENTS", 100)
    Graphs.build(OPTIONS, bare, ITEMS, {}, 7, tmp_path)
    index = np.arange(len(rows.label))
    read = replace(rows, seq=Graphs.load(tmp_path, bare, 7).attach_to(bare))
    assert bits(read, index) == bits(rows, index)
    (tmp_path / "graphs.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match=r"graphs\.json: format 2; this version reads 1"):
        Graphs.load(tmp_path, bare, 7)
    assert {file.name for file in (tmp_path / "near").iterdir()} == {
        f"edges-{name}.npy" for name in ("offsets", "target", "time", "weight")
    }


def test_other_events_make_edges_of_their_own_and_keep_those_of_tables():
    log = make_log()
    draw = np.random.default_rng(4)
    table = Edges(
        draw.integers(0, USERS, 90),
        draw.integers(0, USERS, 90),
        np.zeros(90, np.int64),
        np.ones(90, np.int64),
    )
    options = {**OPTIONS, "friends": Graph(edges="user-user", table="friends.parquet", k=3)}
    seq, _ = build(log, options, {"friends": table})
    # Other users: every second one, in another order, and a new one.
    chosen = log.filter(pa.array(log["user_id"].to_numpy() % 2 == 0))
    renamed = chosen.set_column(
        0, "user_id", pa.array(np.where(chosen["user_id"].to_numpy() == 0, 99, chosen["user_id"]))
    )
    other, _ = build(renamed, {}, {})
    graphs = seq.graphs.replace_events(other, seq.user_id)
    expected = build(renamed)[0].graphs
    for name in OPTIONS:
        for part in ("edges", "back"):
            assert np.array_equal(
                getattr(graphs.graphs[name], part).time, getattr(expected.graphs[name], part).time
            )
    friends = graphs.graphs["friends"].edges.list_edges()
    found = sorted(
        zip(other.user_id[friends.source].tolist(), other.user_id[friends.target].tolist(), strict=True)
    )
    pairs = zip(table.source.tolist(), table.target.tolist(), strict=True)
    assert found == sorted((a, b) for a, b in pairs if a % 2 == b % 2 == 0 and 0 not in (a, b))
    assert 0 < len(found) < 90
