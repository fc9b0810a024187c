"""Signals: the similarity of items with a user's newest events, and the votes that it changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nonet.errors import DataError
from nonet.models.generation import ItemSignals, Trie, VoteOptions, Voters, list_memory_files
from nonet.models.generation.memory import attach
from nonet.models.generation.signals import ItemSearch, open_signals
from nonet.models.tokenizer import check_signals, compute_signals, extend_signals
from nonet.random import rng
from nonet.samples.batches import gather_masked_items, list_prompts
from nonet.samples.sequences import ALLOW, TEST, TRAIN, CountOptions, Sequences, Transitions
from nonet.types import Jagged

CODES, ITEMS = (4, 4, 4), 40
NAMES = ["title", "kinds"]


def make_items(n_items: int = ITEMS, seed: int = 4) -> pa.Table:
    """Items with titles of common, rare and single words, and lists of kinds; some have none."""
    draw = rng(seed, "items")
    titles = [
        " ".join(f"w{n}" for n in draw.integers(0, 12, draw.integers(1, 5))) + f" only{item}"
        for item in range(n_items)
    ]
    titles[3] = None
    kinds = [[f"K{n}" for n in draw.integers(0, 6, draw.integers(0, 4))] for _ in range(n_items)]
    return pa.table({"item_id": range(n_items), "title": titles, "kinds": kinds, "year": [2000.0] * n_items})


def compute_cosines(items: pa.Table, name: str) -> np.ndarray:
    """The cosines [I, I] of the items' IDF-weighted words, as the definition says them."""
    values = items[name].to_pylist()
    texts = [
        set(value.lower().split()) if isinstance(value, str) else {word.lower() for word in value or ()}
        for value in values
    ]
    words = sorted(set().union(*texts))
    idf = {word: np.log(len(texts) / sum(word in text for text in texts)) for word in words}
    rows = np.array([[idf[word] * (word in text) for word in words] for text in texts])
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.divide(rows, norm, out=np.zeros_like(rows), where=norm > 0)
    return rows @ rows.T


def test_similarities_are_weighted_sums_of_cosines():
    items = make_items()
    signals = compute_signals(items, NAMES)
    prompt, item = np.array([0, 0, 1]), np.array([5, 9, 20])
    weight = np.array([1.0, 0.6, 0.5])
    profiles = signals.make_profiles(prompt, item, weight, 3)
    asked_prompt, asked_item = np.divmod(np.arange(3 * ITEMS), ITEMS)
    similarity = profiles.compute_similarities(asked_prompt, asked_item).reshape(3, ITEMS, 2)
    for k, name in enumerate(NAMES):
        cosine = compute_cosines(items, name)
        np.fill_diagonal(cosine, 0)  # a word that one item has is like no other item's, and is not stored
        other = similarity[:, :, k].copy()
        other[prompt, item] = 0
        expected = np.zeros((3, ITEMS))
        np.add.at(expected, prompt, weight[:, None] * cosine[item])
        expected[prompt, item] = 0
        assert other == pytest.approx(expected, abs=1e-6)
    assert not similarity[2].any()  # a prompt without voters
    assert not similarity[:, 3, 0].any()  # an item without a title


def test_new_items_have_the_words_of_the_first_ones_with_their_weights():
    items = make_items(60)
    first, added = items.slice(0, 40), items.slice(40)
    signals = compute_signals(first, NAMES)
    extended = extend_signals(signals, added)
    assert len(extended) == 60
    assert extended.word[: len(signals.word)].tolist() == signals.word.tolist()
    # The words of one more item that has the title of item 5 weigh as those of item 5.
    copy = first.slice(5, 1)
    twin = extend_signals(signals, copy)
    own = slice(int(twin.row[40]), int(twin.row[41]))
    old = slice(int(twin.row[5]), int(twin.row[6]))
    assert twin.word[own].tolist() == twin.word[old].tolist()
    assert twin.value[own] == pytest.approx(twin.value[old], rel=1e-6)
    assert all(np.linalg.norm(extended.value[a:b]) < 2**0.5 + 1e-6 for a, b in pairwise(extended.row))


def test_signals_are_read_as_they_were_written(tmp_path):
    signals = compute_signals(make_items(), NAMES)
    signals.save(tmp_path)
    read = open_signals(list_memory_files(tmp_path), NAMES, ITEMS)
    assert read is not None
    assert read.names == tuple(NAMES)
    assert read.words.equals(signals.words)
    for name in ("row", "word", "value"):
        assert getattr(read, name).tolist() == getattr(signals, name).tolist()
    assert open_signals({}, (), 0) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("signal_word", np.array([10**6], np.int32)),
        ("signal_row", np.array([0, 5, 3])),
        ("signal_value", np.zeros(2, np.float32)),
    ],
)
def test_files_that_do_not_match_are_one_line(tmp_path, name, values):
    compute_signals(make_items(), NAMES).save(tmp_path)
    np.save(tmp_path / f"{name}.npy", values)
    with pytest.raises(DataError, match=r"signals .*: the files do not match"):
        ItemSignals.map(list_memory_files(tmp_path))


def test_missing_and_other_signals_are_one_line(tmp_path):
    with pytest.raises(DataError, match="the memory has signals title, kinds, and there is no signal_row"):
        open_signals({}, NAMES, ITEMS)
    compute_signals(make_items(), ["kinds"]).save(tmp_path)
    with pytest.raises(DataError, match="has signals title, kinds, and its files have kinds"):
        open_signals(list_memory_files(tmp_path), NAMES, ITEMS)
    words = pq.read_table(tmp_path / "signal_words.parquet")
    pq.write_table(
        words.replace_schema_metadata({"format": "3", "items": "40", "signal 0": "kinds"}),
        tmp_path / "signal_words.parquet",
    )
    with pytest.raises(DataError, match=r"format 3; this version reads 1 and 2. Upgrade Nonet"):
        ItemSignals.map(list_memory_files(tmp_path))
    pq.write_table(pa.table({"other": [1]}), tmp_path / "signal_words.parquet")
    with pytest.raises(DataError, match="not readable"):
        ItemSignals.map(list_memory_files(tmp_path))


def test_a_column_without_words_is_one_line():
    with pytest.raises(DataError, match=r"'year' is double; a signal is .*there are title, kinds"):
        compute_signals(make_items(), ["year"])
    with pytest.raises(DataError, match=r"'titel' is no column of the items.* Did you mean 'title'"):
        compute_signals(make_items(), ["titel"])


def make_vectors(seed: int, n_items: int = ITEMS) -> list[list[float] | None]:
    """Vectors that share a direction; one item has none."""
    values = rng(seed, "vectors").normal(size=(n_items, 5)) + np.array([9.0, 0, 0, 0, 0])
    return [None if row == 7 else list(map(float, values[row])) for row in range(n_items)]


def compute_centred_cosines(vectors: list[list[float] | None], mean: np.ndarray) -> np.ndarray:
    """The cosines [I, I] of vectors less a mean; 0 for an item without one."""
    rows = np.array([np.zeros(5) if vector is None else np.array(vector) - mean for vector in vectors])
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows @ rows.T


def test_a_column_of_vectors_is_a_signal_by_the_cosine_of_what_is_left_of_their_mean(tmp_path):
    items, vectors = make_items(), make_vectors(1)
    items = items.append_column("vector", pa.array(vectors, pa.list_(pa.float32())))
    signals = compute_signals(items, ["vector", "kinds"])
    signals.save(tmp_path)
    signals = ItemSignals.map(list_memory_files(tmp_path))
    mean = np.mean([vector for vector in vectors if vector], 0)
    wanted = compute_centred_cosines(vectors, mean)
    pairs = np.arange(ITEMS * ITEMS)
    profiles = signals.make_profiles(np.arange(ITEMS), np.arange(ITEMS), np.ones(ITEMS), ITEMS)
    got = profiles.compute_similarities(pairs // ITEMS, pairs % ITEMS).reshape(ITEMS, ITEMS, 2)
    assert got[..., 0] == pytest.approx(wanted, abs=1e-5)
    assert got[..., 0].min() < -0.5
    alone = compute_signals(items, ["kinds"])
    of_kinds = alone.make_profiles(np.arange(ITEMS), np.arange(ITEMS), np.ones(ITEMS), ITEMS)
    assert got[..., 1] == pytest.approx(
        of_kinds.compute_similarities(pairs // ITEMS, pairs % ITEMS)[:, 0].reshape(ITEMS, ITEMS)
    )

    more = make_vectors(2, 8)
    new = make_items(8, 9).append_column("vector", pa.array(more, pa.list_(pa.float32())))
    extended = extend_signals(signals, new)
    both = compute_centred_cosines(vectors + more, mean)
    prompt, item = np.divmod(np.arange(ITEMS * 8), 8)
    profiles = extended.make_profiles(np.arange(ITEMS), np.arange(ITEMS), np.ones(ITEMS), ITEMS)
    added = profiles.compute_similarities(prompt, item + ITEMS)[:, 0].reshape(ITEMS, 8)
    assert added == pytest.approx(both[:ITEMS, ITEMS:], abs=1e-5)
    without = make_items(8, 9).append_column("vector", pa.nulls(8, pa.list_(pa.float32())))
    assert len(extend_signals(signals, without)) == ITEMS + 8
    empty = make_items(8, 9).append_column("vector", pa.array([[]] * 8, pa.list_(pa.float32())))
    assert len(extend_signals(signals, empty)) == ITEMS + 8
    with pytest.raises(DataError, match="'vector' has vectors of 2 numbers; all vectors must have 5 numbers"):
        extend_signals(signals, make_items(8).slice(0, 1).append_column("vector", pa.array([[1.0, 2.0]])))


def compare_all(signals: ItemSignals) -> np.ndarray:
    """The similarities [I, I, K] of all pairs of items."""
    n_items = len(signals)
    prompt, item = np.divmod(np.arange(n_items**2), n_items)
    profiles = signals.make_profiles(np.arange(n_items), np.arange(n_items), np.ones(n_items), n_items)
    return profiles.compute_similarities(prompt, item).reshape(n_items, n_items, -1)


@pytest.mark.parametrize("order", [["kinds", "a", "b"], ["a", "kinds", "b"], ["b", "a", "kinds"]])
def test_vectors_are_compared_alike_number_by_number_and_as_a_block_also_without_stored_zeros(
    order, monkeypatch
):
    monkeypatch.setattr("nonet.models.generation.signals._PAIRS", 7)
    monkeypatch.setattr("nonet.models.tokenizer.signals._CHUNK_NUMBERS", 20)  # 4 vectors at once
    whole = rng(3, "whole").integers(-1, 2, (ITEMS, 5)).astype(float)
    whole -= whole.sum(0) / ITEMS
    whole[0] = -whole[1:].sum(0)
    whole[1:3] = [[2.0, 0, 0, 0, 0], [-2.0, 0, 0, 0, 0]]  # so that numbers are 0 if the mean is
    whole -= whole.mean(0)
    items = make_items().append_column("a", pa.array(whole.tolist(), pa.list_(pa.float32())))
    items = items.append_column("b", pa.array(make_vectors(1), pa.list_(pa.float32())))
    signals = compute_signals(items, order)
    assert len(signals.blocks) == 2
    got = compare_all(signals)
    for name, vectors in (("a", whole.tolist()), ("b", make_vectors(1))):
        mean = np.mean([vector for vector in vectors if vector], 0)
        assert got[..., order.index(name)] == pytest.approx(compute_centred_cosines(vectors, mean), abs=1e-5)
    # As earlier versions stored them: without the numbers that are about 0.
    kept = np.abs(signals.value) > 0.05
    row = np.concatenate([[0], np.cumsum(kept)])[signals.row]
    sparse = replace(signals, row=row, word=signals.word[kept], value=signals.value[kept])
    assert not sparse.blocks
    exact = replace(signals, value=np.where(kept, signals.value, 0).astype(np.float32))
    assert len(exact.blocks) == 2
    assert compare_all(sparse) == pytest.approx(compare_all(exact), abs=1e-6)


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        ([[1.0], [1.0, 2.0]], "vectors of 1 to 2 numbers; they must be equally long"),
        ([[0.0] * 1025] * 2, "vectors of 1025 numbers; up to 1024 can be compared"),
        ([None, None], "no vector in any row"),
        ([[1.0, float("nan")], [1.0, 2.0]], "NaN, infinite or missing values in 1 rows"),
        ([[1.0, None], [1.0, 2.0]], "NaN, infinite or missing values in 1 rows"),
    ],
)
def test_vectors_that_cannot_be_compared_are_one_line(vectors, says):
    items = pa.table({"item_id": [1, 2], "vector": pa.array(vectors, pa.list_(pa.float64()))})
    with pytest.raises(DataError, match=says):
        check_signals(["vector"], items)


def test_an_order_of_the_items_changes_no_similarity():
    items = make_items()
    order = rng(1, "order").permutation(ITEMS)
    first, second = compute_signals(items, NAMES), compute_signals(items.take(order), NAMES)
    assert first.words.equals(second.words)
    for new, old in enumerate(order):
        ours = slice(int(second.row[new]), int(second.row[new + 1]))
        theirs = slice(int(first.row[old]), int(first.row[old + 1]))
        assert second.word[ours].tolist() == first.word[theirs].tolist()
        assert second.value[ours].tolist() == first.value[theirs].tolist()


def make_voting(width: int) -> tuple[Voters, Voters, Sequences, np.ndarray, np.ndarray]:
    """Voters with and without signals, and prompts."""
    draw = rng(2, "sequences")
    offsets = np.arange(0, 60 * 12 + 1, 12)
    split = np.tile([TRAIN] * 10 + [TEST] * 2, 60).astype(np.int8)
    seq = Sequences(
        user_id=np.arange(60),
        offsets=offsets,
        item=draw.integers(0, ITEMS, 720).astype(np.int32),
        time=np.arange(720),
        event=np.zeros(720, np.int32),
        split=split,
        event_names=("view",),
        user_key=np.arange(60),
        item_key=np.arange(ITEMS),
        repeats=ALLOW,
    )
    codes = rng(0, "codes").choice(64, ITEMS, replace=False)
    trie = Trie.build(np.stack(np.unravel_index(codes, CODES), 1).astype(np.int32), CODES)
    table = Transitions.fit(seq, ITEMS, CountOptions(reach=6, reverse=0.3))
    options = VoteOptions(width=width, last=10, decay=0.7, signals=NAMES)
    signals = compute_signals(make_items(), NAMES)
    users, positions = list_prompts(seq, TEST)
    return Voters(table, trie, options, signals), Voters(table, trie, options), seq, users, positions


def test_leaves_are_selected_by_votes_and_similarity():
    voters, plain, seq, users, positions = make_voting(width=10)
    whole = Voters(voters._transitions, voters._trie, VoteOptions(64, 10, decay=0.7), voters._signals)
    every = whole.compute_votes(seq, users, positions, similarity_weights=(0.0, 0.0))
    assert every.similarity is not None
    weights = (2.0, 1.0)
    chosen = voters.compute_votes(seq, users, positions, similarity_weights=weights)
    assert chosen.similarity is not None
    score = every.weight.log().double() + (every.similarity.double() * torch.tensor(weights)).sum(-1)
    best = score.masked_fill(every.leaf < 0, -torch.inf).topk(10, dim=1).indices.sort(1).values
    assert chosen.leaf.tolist() == every.leaf.gather(1, best).tolist()
    assert chosen.similarity.numpy() == pytest.approx(
        every.similarity.gather(1, best[..., None].expand(-1, -1, 2)).numpy()
    )
    votes = every.weight.gather(1, best)
    assert chosen.weight.numpy() == pytest.approx((votes / votes.sum(1, keepdim=True)).numpy(), rel=1e-5)
    without = plain.compute_votes(seq, users, positions)
    assert without.similarity is None
    unweighted = voters.compute_votes(seq, users, positions, similarity_weights=(0.0, 0.0))
    assert unweighted.leaf.tolist() == without.leaf.tolist()
    assert unweighted.weight.tolist() == without.weight.tolist()


def test_voters_without_similarity_are_those_of_a_memory_without_signals():
    voters, plain, seq, users, positions = make_voting(width=10)
    assert (voters.parts, plain.parts) == (["similarity"], [])
    left = voters.leave_out("similarity").compute_votes(seq, users, positions, similarity_weights=(2.0, 1.0))
    expected = plain.compute_votes(seq, users, positions)
    assert left.similarity is None
    assert (left.leaf.tolist(), left.weight.tolist()) == (expected.leaf.tolist(), expected.weight.tolist())
    assert voters.parts == ["similarity"]


def make_cold_voting(width=16):
    """Return voters of which every third item has no training event, and prompts."""
    voters, _, seq, users, positions = make_voting(width)
    is_cold = np.arange(ITEMS) % 3 == 0
    table = Transitions.fit(
        replace(seq, split=np.where(is_cold[seq.item], TEST, seq.split).astype(np.int8)),
        ITEMS,
        CountOptions(reach=6, reverse=0.3),
    )
    options = VoteOptions(width=width, last=10, decay=0.7, signals=NAMES, cold=True)
    return Voters(table, voters._trie, options, voters._signals), is_cold, seq, users, positions


@pytest.mark.parametrize("weights", [(2.0, 1.0, 0.5), (0.0, 0.0, 0.0)])
def test_cold_items_share_half_of_the_votes_by_similarity(weights):
    voters, is_cold, seq, users, positions = make_cold_voting()
    votes = voters.compute_votes(seq, users, positions, similarity_weights=weights)
    left = voters.leave_out("cold items").compute_votes(seq, users, positions, similarity_weights=weights)
    item_of_leaf, similar = (
        np.asarray(voters._trie.item_of_leaf),
        np.array(weights[:2]) if weights[0] else np.ones(2),
    )
    seen = gather_masked_items(seq, users, positions)
    every = np.flatnonzero(is_cold & (np.asarray(voters._trie.leaf_of_item) >= 0))
    some = 0
    for row in range(len(users)):
        leaf, weight, values = (
            votes.leaf[row].numpy(),
            votes.weight[row].numpy(),
            votes.similarity[row].numpy(),
        )
        item = item_of_leaf[leaf[leaf >= 0]]
        cold = is_cold[item]
        assert values[leaf >= 0, 2].tolist() == (-cold.astype(float)).tolist()
        warm = left.leaf[row][left.leaf[row] >= 0].tolist()
        assert leaf[leaf >= 0][~cold].tolist() == warm
        if not cold.any():
            assert weight[leaf >= 0] == pytest.approx(left.weight[row][left.leaf[row] >= 0].numpy())
            continue
        some += 1
        assert weight[leaf >= 0][cold].sum() == pytest.approx(0.5)
        assert weight[leaf >= 0][~cold] == pytest.approx(left.weight[row][left.leaf[row] >= 0].numpy() / 2)
        candidates = np.setdiff1d(every, seen.values[seen.offsets[row] : seen.offsets[row + 1]])
        leaves = torch.from_numpy(np.asarray(voters._trie.leaf_of_item)[candidates].astype(np.int64))
        padded = torch.full((len(users), len(leaves)), -1)
        padded[row] = leaves
        score = votes.compare(padded)[row, :, :2].numpy() @ similar
        best = candidates[np.lexsort((leaves.numpy(), -score))][: min(4, (score > 0).sum())]
        assert set(item[cold]) == set(best)
        by_item = dict(zip(candidates, score, strict=True))
        share = np.array([by_item[i] for i in item[cold]])
        assert weight[leaf >= 0][cold] == pytest.approx(0.5 * share / share.sum(), rel=1e-4)
    assert some > 10


def test_voters_without_words_find_no_cold_items():
    items = make_items().set_column(1, "title", pa.array([None] * ITEMS, pa.string()))
    items = items.set_column(
        2, "kinds", pa.array([["K1"], ["K1"], *[[]] * (ITEMS - 2)], pa.list_(pa.string()))
    )
    signals = compute_signals(items, ["kinds"])
    search = ItemSearch.of(signals, np.array([0, 1]))
    profiles = signals.make_profiles(np.array([0]), np.array([5]), np.ones(1), 1)
    found = search.find_similar(profiles, np.ones(1), 4, lambda prompt, item: np.ones(len(item), bool))
    assert [len(part) for part in found] == [0, 0, 0]


def test_of_many_cold_items_that_are_alike_each_prompt_gets_as_many_as_there_are_votes_and_none_that_is_hidden():
    n_items, n_prompts = 300, 20
    kinds = [["K1", f"K{2 + i % 2}"] for i in range(n_items)]
    signals = compute_signals(pa.table({"item_id": range(n_items), "kinds": kinds}), ["kinds"])
    search = ItemSearch.of(signals, np.arange(10, n_items))
    voters = np.arange(n_prompts), np.arange(n_prompts) % 2, np.linspace(1, 2, n_prompts)
    profiles = signals.make_profiles(*voters, n_prompts)

    def select(prompt, item):
        return item % 4 < 2

    prompt, item, score = search.find_similar(profiles, np.ones(1), 8, select)
    assert np.bincount(prompt).tolist() == [8] * n_prompts
    assert (item % 4 < 2).all()
    assert (item % 2 == prompt % 2).all()
    assert len(np.unique(item)) > 40  # not the same eight for everybody
    for row in (0, 7):
        alone = signals.make_profiles(np.zeros(1, np.int64), voters[1][[row]], voters[2][[row]], 1)
        _, other, its_score = search.find_similar(alone, np.ones(1), 8, lambda _, items: select(_, items))
        assert other.tolist() == item[prompt == row].tolist()
        assert its_score.tolist() == score[prompt == row].tolist()


def test_the_weight_of_cold_items_follows_those_of_the_signals():
    model = torch.nn.Module()
    attach(model, signals=["title", "kinds"], cold=True)
    of_signals = torch.nn.Module()
    attach(of_signals, signals=["title", "kinds"])
    names = list(dict(model.named_buffers()))
    assert names[:-1] == list(dict(of_signals.named_buffers()))
    assert len(names) == 4


def test_vectors_that_are_text_are_no_words():
    for text in ("[0.5, -1.25, 3e-2]", "0.5;1.5;2", "(1.0 2.0 3.0)"):
        items = pa.table({"item_id": [1, 2], "vector": [None, text]})
        with pytest.raises(DataError, match="holds vectors as text"):
            check_signals(["vector"], items)
    for text in ("1.5 litres of milk", "[2001, 2002, 2003]", "Version 1.5, 2.0 and 2.1"):
        check_signals(["vector"], pa.table({"item_id": [1], "vector": [text]}))


def test_cold_items_get_no_votes_where_nothing_else_votes():
    voters, is_cold, seq, users, _ = make_cold_voting()
    cold = np.flatnonzero(is_cold)
    item = seq.item.copy()
    item[seq.offsets[users[0]] : seq.offsets[users[0] + 1]] = cold[:12]
    seq = replace(seq, item=item)
    positions = np.array([5, 5])
    votes = voters.compute_votes(
        seq, np.array([users[0], users[-1]]), positions, similarity_weights=(1.0, 1.0, 0.0)
    )
    assert (votes.leaf[0] < 0).all()
    assert is_cold[np.asarray(voters._trie.item_of_leaf)[votes.leaf[1]]].any()


def test_cold_items_get_the_same_votes_alone_and_among_others_and_none_where_hidden():
    voters, is_cold, seq, users, positions = make_cold_voting()
    weights = (1.1, 0.7, 0.3)
    together = voters.compute_votes(seq, users, positions, similarity_weights=weights)
    item_of_leaf = np.asarray(voters._trie.item_of_leaf)
    for row in range(0, len(users), 5):
        alone = voters.compute_votes(seq, users[[row]], positions[[row]], similarity_weights=weights)
        n = alone.leaf.shape[1]
        assert alone.leaf[0].tolist() == together.leaf[row, :n].tolist()
        assert alone.weight[0].tolist() == together.weight[row, :n].tolist()
        item = item_of_leaf[alone.leaf[0][alone.leaf[0] >= 0]]
        if len(cold := item[is_cold[item]]):
            hidden = Jagged(cold[:1].astype(np.int64), np.array([0, 1]))
            again = voters.compute_votes(
                seq, users[[row]], positions[[row]], hidden, similarity_weights=weights
            )
            assert cold[0] not in item_of_leaf[again.leaf[0][again.leaf[0] >= 0]]


def test_a_prompt_has_the_same_votes_alone_and_among_others():
    voters, _, seq, users, positions = make_voting(width=10)
    together = voters.compute_votes(seq, users, positions, similarity_weights=(1.1, 0.7))
    for row in range(0, len(users), 7):
        alone = voters.compute_votes(seq, users[[row]], positions[[row]], similarity_weights=(1.1, 0.7))
        assert alone.leaf[0].tolist() == together.leaf[row].tolist()
        assert alone.weight[0].tolist() == together.weight[row].tolist()
        assert alone.similarity[0].tolist() == together.similarity[row].tolist()
