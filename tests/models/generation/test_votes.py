"""What transitions vote for: nobody votes with their own future, masked items get no votes, the best are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nonet.errors import ConfigError
from nonet.models.baselines.kinds.transition_counter import TransitionCounter
from nonet.models.generation.trie import Trie
from nonet.models.generation.votes import VoteCounter, VoteOptions, Voters
from nonet.random import rng
from nonet.samples.batches import gather_masked_items, list_prompts
from nonet.samples.sequences import ALLOW, MASK, TEST, TRAIN, CountOptions, Sequences, Transitions

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
    ],
    ids=str,
)
def test_nobody_votes_with_their_own_future(options):
    """At training positions, repeats among them: the votes of counts refitted without the user's events from there on."""
    seq, count = _sequences(), CountOptions(neighbours=ITEMS, **options)
    every_user, every_position = list_prompts(seq, TRAIN)
    table = Transitions.fit(seq, ITEMS, count)
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
        without = Transitions.fit(replace(seq, split=split), ITEMS, count)
        expected = VoteCounter(without, VoteOptions()).count_votes(
            replace(seq, split=split), np.array([user]), np.array([position])
        )
        assert told[row] == pytest.approx(_dense(expected, 1)[0], abs=1e-6), (user, position)
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
