"""What transitions vote for: nobody votes with their own future, masked items get no votes, the best are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.baselines.kinds.transition_counter import TransitionCounter
from nonet.models.generation.beams import SubCatalogue
from nonet.models.generation.fitting import _compute_target_votes, choose_votes
from nonet.models.generation.trie import Trie
from nonet.models.generation.vote_counter import VoteCounter, VoteOptions
from nonet.models.generation.votes import (
    Voters,
    count_cooccurrence,
    list_memory_files,
    make_cooccurrence_counter,
)
from nonet.random import rng
from nonet.samples.batches import (
    find_recommendable_events,
    gather_masked_items,
    list_prompts,
    locate_prompts,
)
from nonet.samples.sequences import ALLOW, MASK, TEST, TRAIN, VALID, CountOptions, Sequences, Transitions

ITEMS = 40
CODES = (4, 4, 4)


def _sequences(users=60, longest=40, seed=1, repeats=ALLOW, held_out=2) -> Sequences:
    draw = rng(seed, "sequences")
    lengths = draw.integers(3, longest, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    split = np.full(total, TRAIN, np.int8)
    for end in offsets[1:]:
        split[end - held_out : end] = TEST
    return Sequences(
        user_id=np.arange(users),
        offsets=offsets,
        item=(draw.integers(0, ITEMS, total) ** 2 // ITEMS).astype(np.int32),  # some often: repeats
        time=np.sort(draw.integers(0, 10**6, total)),
        event=draw.integers(0, 2, total).astype(np.int32),
        split=split,
        user_key=np.arange(users),
        item_key=np.arange(ITEMS),
        event_names=("view", "buy"),
        repeats=repeats,
    )


def _trie() -> Trie:
    codes = rng(0, "codes").choice(64, ITEMS, replace=False)
    return Trie.build(np.stack(np.unravel_index(codes, CODES), 1).astype(np.int32), CODES)


def _dense(cells, prompts_: int) -> np.ndarray:
    prompt, item, vote = cells
    dense = np.zeros((prompts_, ITEMS))
    dense[prompt, item] = vote
    return dense


def _keep_neighbours(transitions: Transitions, kept: Transitions) -> Transitions:
    """Remove the neighbours that `kept` does not have."""
    keys, kept_keys = (
        np.repeat(np.arange(ITEMS), np.diff(counts.row)) * ITEMS + counts.item
        for counts in (transitions, kept)
    )
    is_kept = np.isin(keys, kept_keys)
    row = np.searchsorted(keys[is_kept], np.arange(ITEMS + 1) * ITEMS)
    return replace(transitions, row=row, item=transitions.item[is_kept], count=transitions.count[is_kept])


def test_votes_are_those_of_the_transition_counter():
    seq = _sequences()
    users, positions = list_prompts(seq, TEST)
    counter = TransitionCounter(ITEMS).fit(seq)
    voters = VoteCounter(Transitions.fit(seq, ITEMS, CountOptions(neighbours=ITEMS)), VoteOptions())
    dense = _dense(voters.count_votes(seq, users, positions), len(users))
    said = counter.votes(seq, users, positions)
    assert dense == pytest.approx(
        _dense((said.prompt, said.item, said.weight), len(users)), rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"events": ("buy",)},
        {"half_life_s": 2e5},
        {"reverse": 0.3, "reach": 6},
        {"reverse": 0.5, "events": ("buy",), "half_life_s": 2e5},
        {"reverse": 1.0, "reach": 20, "cosine": True},
        {"reverse": 1.0, "reach": 20, "cosine": True, "events": ("buy",), "half_life_s": 2e5},
    ],
    ids=str,
)
@pytest.mark.parametrize("neighbours", [ITEMS, 3])
def test_nobody_votes_with_their_own_future(options, neighbours):
    """At training positions, repeats among them: the votes of counts refitted without the user's events from there on.

    Of these, the neighbours that were kept of each item.
    """
    seq, count = _sequences(), CountOptions(neighbours=ITEMS, **options)
    every_user, every_position = list_prompts(seq, TRAIN)
    table = Transitions.fit(seq, ITEMS, replace(count, neighbours=neighbours))
    newest = seq.time == table.until  # the end that ages are told from stays in
    chosen = rng(2, "chosen").choice(len(every_user), 200, replace=False)
    users, positions = every_user[chosen], every_position[chosen]
    told = _dense(VoteCounter(table, VoteOptions()).count_votes(seq, users, positions), len(users))
    repeats = 0
    for row, (user, position) in enumerate(zip(users, positions, strict=True)):
        first, end = int(seq.offsets[user]), int(seq.offsets[user + 1])
        if newest[first + position : end].any():
            continue
        split = seq.split.copy()
        split[first + position : end] = TEST
        without = _keep_neighbours(Transitions.fit(replace(seq, split=split), ITEMS, count), table)
        expected = VoteCounter(without, VoteOptions()).count_votes(
            replace(seq, split=split), np.array([user]), np.array([position])
        )
        expected = _dense(expected, 1)[0]
        assert told[row] == pytest.approx(expected, abs=1e-6), (user, position)
        assert np.array_equal(told[row] > 0, expected > 0), "no vote is a rounding error"
        last = seq.item[first + max(0, position - 5) : first + position]
        repeats += bool(np.isin(last, seq.item[first + position : end]).any())
    assert repeats > 20


def test_masked_items_and_those_outside_the_catalogue_get_no_votes():
    seq = _sequences(repeats=MASK)
    users, positions = list_prompts(seq, TEST)
    sids = np.stack(np.unravel_index(np.arange(ITEMS), CODES), 1).astype(np.int32)
    listed = np.arange(0, ITEMS, 2)
    trie = Trie.build(sids, CODES, items=listed)
    votes = Voters(Transitions.fit(seq, ITEMS), trie).compute_votes(seq, users, positions)
    hidden = gather_masked_items(seq, users, positions)
    some = 0
    for row in range(len(users)):
        leaves = votes.leaf[row][votes.leaf[row] >= 0].numpy()
        seen = hidden.values[hidden.offsets[row] : hidden.offsets[row + 1]]
        assert not np.isin(trie.item_of_leaf[leaves], seen).any()
        some += len(leaves)
    assert some
    assert votes.weight.sum(1)[(votes.leaf >= 0).any(1)].numpy() == pytest.approx(1.0, abs=1e-6)


def test_the_cut_keeps_the_best_and_ties_go_to_the_lower_leaf():
    seq, trie = _sequences(), _trie()
    users, positions = list_prompts(seq, TEST)
    table = Transitions.fit(seq, ITEMS)
    whole = Voters(table, trie, VoteOptions(width=ITEMS)).compute_votes(seq, users, positions)
    few = Voters(table, trie, VoteOptions(width=4)).compute_votes(seq, users, positions)
    assert few.leaf.shape[1] == 4
    for row in range(len(users)):
        order = sorted(
            (-float(weight), int(leaf))
            for weight, leaf in zip(whole.weight[row], whole.leaf[row], strict=True)
            if leaf >= 0
        )
        best = sorted(leaf for _, leaf in order[:4])
        assert few.leaf[row][few.leaf[row] >= 0].tolist() == best


def test_cooccurring_items_vote_by_the_cosine_of_their_users():
    item = np.array([0, 1, 0, 1, 0, 2, 0, 1])  # four users with two events each
    seq = _histories(item, [0, 2, 4, 6, 8], [TRAIN] * 6 + [TEST] * 2)
    options = CountOptions(reach=20, reverse=1.0, cosine=True)
    counter = VoteCounter(Transitions.fit(seq, 3, options), VoteOptions(last=20, decay=0.7))
    votes = _dense(counter.count_votes(seq, np.array([3]), np.array([1])), 1)[0, :3]
    assert votes == pytest.approx([1.0, 2 / np.sqrt(3 * 2), 1 / np.sqrt(3 * 1)])


def test_the_nearest_items_of_a_cosine_are_kept():
    # Item 0 occurs with 1 twice, which occurs with all others too, and with 2 once, which occurs with it alone.
    item = np.array([0, 1, 0, 1, 0, 2, 3, 1, 4, 1, 5, 1, 6, 1])
    seq = _histories(item, range(0, 15, 2), [TRAIN] * 14)
    options = CountOptions(reach=20, reverse=1.0, neighbours=1, cosine=True)
    table = Transitions.fit(seq, 7, options)
    assert table.item[table.row[0] : table.row[1]].tolist() == [2]
    plain = Transitions.fit(seq, 7, replace(options, cosine=False))
    assert plain.item[plain.row[0] : plain.row[1]].tolist() == [1]


def test_votes_of_transitions_and_of_cooccurrence_are_mixed_by_their_shares():
    seq, trie = _sequences(), _trie()
    users, positions = list_prompts(seq, TEST)
    table = Transitions.fit(seq, ITEMS, CountOptions(events=("buy",)))
    pairs = Transitions.fit(seq, ITEMS, CountOptions(reach=20, reverse=1.0, cosine=True))
    options = VoteOptions(width=ITEMS, cooccurrence=0.4)

    def vote(transitions: Transitions, cooccurrence: Transitions | None) -> np.ndarray:
        voters = Voters(transitions, trie, options, cooccurrence=cooccurrence)
        votes = voters.compute_votes(seq, users, positions)
        dense = np.zeros((len(users), ITEMS + 1))
        np.put_along_axis(dense, votes.leaf.numpy() % (ITEMS + 1), votes.weight.numpy(), 1)
        return dense[:, :ITEMS]

    only_pairs = vote(_forget(table), pairs)
    mixed, first = vote(table, pairs), vote(table, None)
    has_votes = first.sum(1) > 0
    assert 0 < has_votes.sum() < len(users)  # prompts without a purchase have no votes of transitions
    assert mixed.sum(1) == pytest.approx(np.ones(len(users)))
    expected = np.where(has_votes[:, None], 0.6 * first + 0.4 * only_pairs, only_pairs)
    assert mixed == pytest.approx(expected, abs=1e-6)


def test_masked_items_get_no_votes_of_cooccurrence():
    seq, trie = _sequences(repeats=MASK), _trie()
    users, positions = list_prompts(seq, TEST)
    pairs = Transitions.fit(seq, ITEMS, CountOptions(reach=20, reverse=1.0, cosine=True))
    options = VoteOptions(width=ITEMS, cooccurrence=0.5)
    voters = Voters(_forget(pairs), trie, options, cooccurrence=pairs)
    hidden = gather_masked_items(seq, users, positions)
    allowed = SubCatalogue(trie, (np.arange(ITEMS) % 2 == 0)[None])
    for within in (None, allowed):
        votes = voters.compute_votes(seq, users, positions, within=within)
        for row in range(len(users)):
            voted = trie.item_of_leaf[votes.leaf[row][votes.leaf[row] >= 0].numpy()]
            assert len(voted)
            assert not np.isin(voted, hidden.values[hidden.offsets[row] : hidden.offsets[row + 1]]).any()
            assert within is None or not (voted % 2).any()


def test_cooccurrence_reaches_twenty_events_and_its_votes_fall_with_their_age(tmp_path):
    item = np.concatenate([np.arange(22), [0, 1]])
    seq = _histories(item, [0, 22, 24], [TRAIN] * 22 + [TEST] * 2)
    table = count_cooccurrence(tmp_path, seq, CountOptions(events=(), neighbours=ITEMS), ITEMS)
    assert table.item[table.row[0] : table.row[1]].tolist() == list(range(1, 21))
    assert table.options == CountOptions(reach=20, reverse=1.0, neighbours=ITEMS, cosine=True)
    kinds = CountOptions(events=("buy",), half_life_s=100.0)
    counted = count_cooccurrence(tmp_path / "kinds", seq, kinds, ITEMS).options
    assert (counted.events, counted.half_life_s) == (("buy",), 100.0)
    votes = _dense(make_cooccurrence_counter(table).count_votes(seq, np.array([1]), np.array([2])), 1)[0]
    assert votes[21] == pytest.approx(1.0)  # by the newest event, 1, alone: 0 is 21 events from it
    assert votes[2] == pytest.approx(1 + 2**-0.7)


def _repeat_histories(newest_tells: bool, users: int = 300) -> Sequences:
    """Histories a b c d: d follows from c, the newest item, or from a alone."""
    draw = rng(4, "histories")
    a, b, c = draw.integers(0, 10, (3, users))
    d = 30 + (c if newest_tells else a)
    item = np.stack([a, 10 + b, 20 + c, d], 1).flatten()
    half = users // 2
    split = np.concatenate([np.full(half * 4, TRAIN), np.tile([TRAIN, TRAIN, TRAIN, VALID], users - half)])
    return _histories(item, np.arange(users + 1) * 4, split.tolist())


@pytest.mark.parametrize(("newest_tells", "decay"), [(True, 3.0), (False, 0.5)])
def test_validation_chooses_how_fast_the_votes_of_older_events_fall(newest_tells, decay):
    seq = _repeat_histories(newest_tells)
    table = Transitions.fit(seq, ITEMS, CountOptions(reach=6, neighbours=ITEMS))
    assert choose_votes(seq, table, None, 10, 1) == {"decay": decay}


def test_validation_chooses_no_share_for_cooccurrence_that_tells_nothing(tmp_path):
    seq = _repeat_histories(True)
    table = Transitions.fit(seq, ITEMS, CountOptions(reach=1, neighbours=ITEMS))
    pairs = count_cooccurrence(tmp_path, _sequences(), CountOptions(neighbours=ITEMS), ITEMS)
    assert choose_votes(seq, table, pairs, 10, 1)["cooccurrence"] == 0.0
    same = Transitions.fit(seq, ITEMS, CountOptions(reach=20, reverse=1.0, cosine=True))
    assert choose_votes(seq, _forget(table), same, 10, 1)["cooccurrence"] == 0.3


def test_what_validation_chose_travels_with_the_counts(tmp_path):
    seq = _sequences()
    users, positions = list_prompts(seq, TEST)
    Transitions.write(tmp_path, seq, ITEMS)
    plain = Voters.open(list_memory_files(tmp_path), _trie(), VoteOptions())
    slow = Voters.open(list_memory_files(tmp_path), _trie(), VoteOptions(decay=0.5))
    count_cooccurrence(tmp_path, seq, CountOptions(), ITEMS)
    replace(Transitions.load(tmp_path), chosen={"decay": 2.0, "cooccurrence": 0.2}).save_meta(tmp_path)
    files = list_memory_files(tmp_path)

    def vote(voters: Voters) -> np.ndarray:
        return voters.compute_votes(seq, users, positions).weight.numpy()

    chosen = Voters.open(files, _trie(), VoteOptions(cooccurrence=0.3))
    given = Voters.open(files, _trie(), VoteOptions(cooccurrence=0.2, decay=2.0))
    assert np.array_equal(vote(chosen), vote(given))
    without = Voters.open(files, _trie(), VoteOptions())
    assert np.array_equal(vote(without), vote(Voters.open(files, _trie(), VoteOptions(decay=2.0))))
    assert not np.array_equal(vote(without), vote(plain))
    assert np.array_equal(vote(Voters.open(files, _trie(), VoteOptions(decay=0.5))), vote(slow))
    assert Transitions.load(tmp_path).chosen == {"decay": 2.0, "cooccurrence": 0.2}


def test_a_share_of_zero_that_validation_chose_is_loaded_again(tmp_path):
    transitions = Transitions.write(tmp_path, _sequences(), ITEMS)
    replace(transitions, chosen={"decay": 1.0, "cooccurrence": 0.0}).save_meta(tmp_path)
    assert Transitions.load(tmp_path).chosen == {"decay": 1.0, "cooccurrence": 0.0}


@pytest.mark.parametrize(
    "content", [{"decay": np.nan}, {"decay": -5}, {"decay": 500}, {"last": 5}, {"decay": None}, [1]]
)
def test_a_choice_that_validation_cannot_have_made_is_refused(tmp_path, content):
    Transitions.write(tmp_path, _sequences(), ITEMS)
    file = tmp_path / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chosen": content}))
    with pytest.raises(DataError, match="not readable"):
        Transitions.load(tmp_path)


@pytest.mark.parametrize("repeats", [ALLOW, MASK])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_most_likely_of_all_decays_and_shares(tmp_path, repeats, seed):
    """Votes of events that are weighed one at a time, by the mixture that models use."""
    seq = _sequences(users=30, longest=14, seed=seed, repeats=repeats)
    split = seq.split.copy()
    split[seq.offsets[1:] - 2] = VALID
    seq = replace(seq, split=split)
    table = Transitions.fit(seq, ITEMS, CountOptions(neighbours=ITEMS, reach=2, events=("buy",)))
    pairs = count_cooccurrence(tmp_path, seq, CountOptions(neighbours=ITEMS), ITEMS)
    users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
    trie, likelihood = _trie(), {}
    target = trie.leaf_of_item[seq.item[seq.offsets[users] + positions]]
    for decay in (1.0, 0.5, 0.7, 1.5, 2.0, 3.0):
        for share in (0.3, 0.0, 0.1, 0.2):
            options = VoteOptions(width=ITEMS, last=10, decay=decay, cooccurrence=share)
            # A share of 0 still gives all votes to co-occurrence where transitions have none.
            options = replace(options, cooccurrence=share or 1e-9)
            votes = Voters(table, trie, options, cooccurrence=pairs).compute_votes(seq, users, positions)
            vote = np.where(votes.leaf.numpy() == target[:, None], votes.weight.numpy(), 0).sum(1)
            if not share:
                has_none = VoteCounter(table, options).count_votes(seq, users, positions)[0]
                vote[~np.isin(np.arange(len(users)), has_none)] = 0
            likelihood[decay, share] = np.log(0.9 * vote + 0.1 / ITEMS)
    chosen = tuple(choose_votes(seq, table, pairs, 10, 1).values())
    gain = max(likelihood.values(), key=np.sum) - likelihood[1.0, 0.3]
    if gain.sum() < 2 * np.sqrt((gain**2).sum()):
        assert chosen == (1.0, 0.3)
        return
    assert likelihood[chosen].sum() == pytest.approx(max(map(np.sum, likelihood.values())), abs=1e-3)


@pytest.mark.parametrize(("repeats", "share"), [(MASK, 1.0), (ALLOW, 0.5)])
def test_a_choice_counts_no_votes_for_hidden_items(repeats, share):
    """After item 0, item 1 follows as often as item 2, which the last user has had: it is hidden if repeats are masked."""
    seq = _histories(np.array([0, 1, 0, 2, 2, 0, 1]), [0, 2, 4, 7], [TRAIN] * 6 + [VALID])
    seq = replace(seq, repeats=repeats)
    counter = VoteCounter(Transitions.fit(seq, ITEMS, CountOptions(reach=1)), VoteOptions(last=1))
    shares, has_votes = _compute_target_votes(counter, ITEMS, seq, np.array([2]), np.array([2]))
    assert shares.tolist() == [share]
    assert has_votes.tolist() == [True]


def test_a_choice_without_validation_events_is_that_of_most_data(tmp_path):
    seq = replace(_sequences(), split=np.zeros_like(_sequences().split))
    table = Transitions.fit(seq, ITEMS)
    assert choose_votes(seq, table, table, 10, 1) == {"decay": 1.0, "cooccurrence": 0.3}


def test_a_memory_without_its_counts_of_cooccurrence_is_refused(tmp_path):
    seq, trie, options = _sequences(), _trie(), VoteOptions(cooccurrence=0.4)
    table = Transitions.write(tmp_path, seq, ITEMS)
    with pytest.raises(DataError, match="there are no counts of co-occurrence"):
        Voters.open(list_memory_files(tmp_path), trie, options)
    count_cooccurrence(tmp_path, seq, table.options, ITEMS)
    users, positions = list_prompts(seq, TEST)
    files = list_memory_files(tmp_path)
    assert {path.name for path in files.values()} == {path.name for path in tmp_path.iterdir()}
    both = Voters.open(files, trie, options).compute_votes(seq, users, positions)
    alone = Voters.open(files, trie, VoteOptions()).compute_votes(seq, users, positions)
    assert not np.array_equal(both.weight.numpy(), alone.weight.numpy())
    voters = Voters.open(files, trie, options)
    assert voters.parts == ["co-occurrence"]
    left = voters.leave_out("co-occurrence").compute_votes(seq, users, positions)
    assert (left.leaf.tolist(), left.weight.tolist()) == (alone.leaf.tolist(), alone.weight.tolist())
    _forget(table, ITEMS + 1).save(tmp_path)
    with pytest.raises(DataError, match="co-occurrence of"):
        Voters.open(list_memory_files(tmp_path), trie, options)


def _histories(item: np.ndarray, offsets, split: list[int]) -> Sequences:
    """Return sequences with these items, one second apart."""
    offsets = np.array(list(offsets), np.int64)
    seq = _sequences()
    return replace(
        seq,
        offsets=offsets,
        item=item.astype(seq.item.dtype),
        time=np.arange(len(item)),
        event=np.zeros(len(item), seq.event.dtype),
        split=np.array(split, np.int8),
        user_id=np.arange(len(offsets) - 1),
    )


def _forget(table: Transitions, items: int = ITEMS) -> Transitions:
    """Return transitions without any count."""
    none = np.empty(0)
    return replace(
        table,
        row=np.zeros(items + 1, np.int64),
        item=none.astype(np.int32),
        count=none.astype(np.float32),
        occurs=np.zeros(items, np.float32),
    )


def test_a_prompt_without_history_has_no_votes():
    seq = _sequences()
    votes = Voters(Transitions.fit(seq, ITEMS), _trie()).compute_votes(
        seq, np.array([0, 1]), np.array([0, 3])
    )
    assert (votes.leaf[0] == -1).all()
    assert float(votes.weight[0].sum()) == 0.0
    assert (votes.leaf[1] >= 0).any()


def test_the_newest_event_votes_with_one_and_older_ones_with_a_power_of_their_age():
    assert VoteOptions(decay=0.7).weigh_ages(np.arange(3)) == pytest.approx([1, 2**-0.7, 3**-0.7])
    assert VoteOptions(fade=0.5).weigh_ages(np.arange(3)) == pytest.approx([1, 0.5, 0.25])


def test_an_event_kind_that_is_not_there_is_one_line():
    with pytest.raises(
        ConfigError, match=r"model\.memory\.events: the data has no event 'buyy'; its kinds are view, buy"
    ):
        Transitions.fit(_sequences(), ITEMS, CountOptions(events=("buyy",)))
