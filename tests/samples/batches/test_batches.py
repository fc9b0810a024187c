import cProfile

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.samples.batches.batches import cut_windows, make_prompt_batch, make_training_batch
from nonet.samples.batches.prompt_rows import list_prompts
from nonet.samples.sequences.sequences import RL, TEST, TRAIN, VALID, Sequences, build_sequences

SPLIT = {"test": 2, "valid": 1, "rl": 2}


def _sequences(seed: int = 0, users: int = 25, items: int = 50, events: int = 1500, split=None) -> Sequences:
    rng = np.random.default_rng(seed)
    rating = rng.integers(1, 6, events).astype(np.float32)
    log = pa.table(
        {
            "user_id": (rng.random(events) ** 2 * users).astype(np.int64),
            "item_id": np.concatenate([np.arange(items), rng.integers(0, items, events - items)]),
            "timestamp": rng.integers(0, 10_000_000, events),
            "rating": pa.array(rating, mask=rating == 3),
        }
    )
    return build_sequences(log, None, split=split or SPLIT, targets={"finetune": "rating >= 4"})[0]


def _sids(items: int = 50) -> np.ndarray:
    return np.random.default_rng(9).integers(0, 16, (items, 3)).astype(np.int32)


def _events(batch, seq: Sequences) -> np.ndarray:
    """Return the index into all events of every packed event, from the uids: a block and the event before it."""
    index = []
    for uid, length in zip(batch.uid, np.diff(batch.item.offsets.numpy()), strict=True):
        row, block = map(int, uid.split("/")[2].split(":"))
        index.append(seq.offsets[row] + max(block - 1, 0) + np.arange(length))
    return np.concatenate(index)


@pytest.mark.parametrize("history", [1, 2, 7, 50, 500])
def test_each_train_event_is_a_target_exactly_once_an_epoch(history):
    seq, rows = _sequences(), np.arange(25)
    for epoch in range(3):
        batch = make_training_batch(
            seq, _sids(), rows, history=history, stage="pretrain", epoch=epoch, seed=7, target=None
        )
        times = np.bincount(_events(batch, seq)[batch.loss_mask.values.numpy()], minlength=len(seq.item))
        np.testing.assert_array_equal(times, (seq.split == TRAIN).astype(int))
        assert np.diff(batch.item.offsets.numpy()).max() <= history + 1


def test_training_batch_never_holds_an_event_that_is_held_out():
    seq = _sequences()
    batch = make_training_batch(
        seq, _sids(), np.arange(len(seq)), history=9, stage="s", epoch=0, seed=1, target=None
    )
    assert (seq.split[_events(batch, seq)] == TRAIN).all()


def test_a_window_starts_with_a_target_only_at_a_users_first_event():
    seq = _sequences()
    batch = make_training_batch(
        seq, _sids(), np.arange(len(seq)), history=5, stage="s", epoch=0, seed=1, target=None
    )
    starts = batch.item.offsets[:-1]
    first = np.isin(_events(batch, seq)[starts.numpy()], seq.offsets[:-1])
    asked_of_nothing = batch.loss_mask.values[starts].numpy()
    assert asked_of_nothing.sum() == len(seq)
    assert first[asked_of_nothing].all()
    assert (batch.loss_mask.values.numpy().sum() + (~asked_of_nothing).sum()) == len(batch.item.values)


def test_packed_values_are_those_of_the_events():
    seq, sids = _sequences(), _sids()
    batch = make_training_batch(
        seq, sids, np.array([3, 0]), history=5, stage="s", epoch=2, seed=1, target=None
    )
    events = _events(batch, seq)
    np.testing.assert_array_equal(batch.item.values.numpy(), seq.item[events])
    np.testing.assert_array_equal(batch.sid.numpy(), sids[seq.item[events]])
    np.testing.assert_array_equal(batch.time.values.numpy(), seq.time[events])
    np.testing.assert_array_equal(
        batch.context["rating"].values.numpy(), np.nan_to_num(seq.columns["rating"][events])
    )
    keys = np.repeat(batch.context["user"].numpy(), np.diff(batch.item.offsets.numpy()))
    np.testing.assert_array_equal(keys, seq.user_key[seq.user[events]])
    np.testing.assert_array_equal(batch.context["item"].values, seq.item_key[seq.item[events]])
    kinds = [
        batch.item.values,
        batch.sid,
        batch.time.values,
        batch.event.values,
        batch.context["user"],
        batch.item.offsets,
    ]
    assert {tensor.dtype for tensor in kinds} == {torch.int64}
    assert batch.context["rating"].values.dtype == torch.float32
    assert np.isnan(seq.columns["rating"]).any()
    assert batch.target is None
    assert len(set(batch.uid)) == len(batch.uid)
    assert all(uid.startswith("s/2/") for uid in batch.uid)


def test_target_condition_masks_the_loss_and_keeps_the_history():
    seq = _sequences()
    kwargs = {"history": 9, "stage": "finetune", "epoch": 1, "seed": 4}
    every = make_training_batch(seq, _sids(), np.arange(len(seq)), target=None, **kwargs)
    liked = make_training_batch(seq, _sids(), np.arange(len(seq)), target=seq.targets["finetune"], **kwargs)
    asked = _events(liked, seq)[liked.loss_mask.values.numpy()]
    wanted = np.flatnonzero((seq.split == TRAIN) & seq.targets["finetune"])
    assert sorted(asked.tolist()) == wanted.tolist()
    whole = {uid: every.item[i].tolist() for i, uid in enumerate(every.uid)}
    assert all(whole[uid] == liked.item[i].tolist() for i, uid in enumerate(liked.uid))


def test_windows_without_a_target_are_dropped():
    seq = _sequences()
    only = np.zeros(len(seq.item), bool)
    only[seq.offsets[3] + 1] = True
    batch = make_training_batch(
        seq, _sids(), np.arange(len(seq)), history=4, stage="s", epoch=0, seed=0, target=only
    )
    assert len(batch.item) == 1
    assert _events(batch, seq)[batch.loss_mask.values.numpy()].tolist() == [seq.offsets[3] + 1]
    none = make_training_batch(
        seq, _sids(), np.arange(len(seq)), history=4, stage="s", epoch=0, seed=0, target=np.zeros_like(only)
    )
    assert len(none.item) == 0
    assert none.sid.shape == (0, 3)


def test_windows_depend_on_seed_stage_epoch_and_user_alone():
    seq = _sequences()
    kwargs = {"history": 9, "stage": "pretrain", "epoch": 1, "seed": 4}

    def of(rows, **change):
        row, start, stop = cut_windows(seq, np.array(rows), **{**kwargs, **change})
        return list(zip(row.tolist(), start.tolist(), stop.tolist(), strict=True))

    together, alone = of([2, 0, 1]), of([0])
    assert [window for window in together if window[0] == 0] == alone
    rows = list(range(len(seq)))
    for change in ({"seed": 5}, {"stage": "finetune"}, {"epoch": 2}):
        assert of(rows, **change) != of(rows)
    assert of(rows) == of(rows)


def test_over_epochs_the_first_block_takes_every_length():
    seq = _sequences()
    row = int(np.argmax(seq.train_lengths))
    lengths = set()
    for epoch in range(60):
        _, block, stop = cut_windows(seq, np.array([row]), history=4, stage="s", epoch=epoch, seed=0)
        lengths.add(int(stop[0] - block[0]))
    assert lengths == {1, 2, 3, 4}


def test_uids_are_unique_even_when_two_windows_start_at_the_same_event():
    seq = _sequences()
    for epoch in range(30):
        batch = make_training_batch(
            seq, _sids(), np.arange(len(seq)), history=2, stage="s", epoch=epoch, seed=0, target=None
        )
        assert len(set(batch.uid)) == len(batch.uid)


def test_short_users_give_one_whole_window_and_users_without_training_events_none():
    log = pa.table({"user_id": [1, 1, 2, 2, 3], "item_id": [1, 2, 1, 3, 2], "timestamp": [1, 9, 1, 2, 9]})
    seq, _ = build_sequences(log, None, split={"use": "time", "test": "1970-01-01T00:00:05"})
    kwargs = {"history": 4, "stage": "s", "epoch": 0, "seed": 0, "target": None}
    batch = make_training_batch(seq, _sids(3), np.array([0, 1, 2]), **kwargs)
    assert batch.context["user"].tolist() == seq.user_key[:2].tolist()
    assert batch.item.offsets.tolist() == [0, 1, 3]
    assert batch.loss_mask.values.all()
    nothing = make_training_batch(seq, _sids(3), np.array([2]), **kwargs)
    assert len(nothing.item) == 0


@pytest.mark.parametrize("split", [SPLIT, {"use": "time", "test": "1970-03-20", "valid": "1w", "rl": "1w"}])
@pytest.mark.parametrize("kind", [RL, VALID, TEST])
def test_no_prompt_leaks_its_target_or_anything_after_it(kind, split):
    seq, history = _sequences(split=split), 6
    users, positions = list_prompts(seq, kind)
    batch = make_prompt_batch(seq, _sids(), users, positions, history=history, stage="rl")
    asked = seq.offsets[users] + positions
    np.testing.assert_array_equal(batch.target.numpy(), seq.item[asked])
    for i, event in enumerate(asked):
        first = max(seq.offsets[users[i]], event - history)
        np.testing.assert_array_equal(batch.item[i].numpy(), seq.item[first:event])
        assert (batch.time[i].numpy() <= seq.time[event]).all()
        assert (seq.split[first:event] <= seq.split[event]).all()
    assert not batch.loss_mask.values.any()
    assert len(users) == (seq.split == kind).sum() > 0


def test_prompt_at_a_users_first_event_is_an_empty_sequence():
    seq = _sequences()
    batch = make_prompt_batch(seq, _sids(), np.array([0, 1]), np.array([0, 3]), history=5, stage="test")
    assert np.diff(batch.item.offsets.numpy()).tolist() == [0, 3]
    assert batch.uid == ["test/0/0:0", "test/0/1:3"]


def test_prompt_outside_a_users_events_is_refused():
    seq = _sequences()
    with pytest.raises(IndexError, match="user row 1 has"):
        make_prompt_batch(seq, _sids(), np.array([1]), np.array([10_000]), history=5, stage="test")


def test_the_calls_for_a_batch_do_not_grow_with_its_events():
    calls, events = [], []
    for length in (700, 2800):
        seq = _sequences(users=10, events=length, split={"test": 1})
        args = {"history": 50, "stage": "s", "epoch": 0, "seed": 0, "target": None}
        make_training_batch(seq, _sids(), np.arange(len(seq)), **args)
        profile = cProfile.Profile()
        profile.enable()
        batch = make_training_batch(seq, _sids(), np.arange(len(seq)), **args)
        profile.disable()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        events.append(len(batch.item.values))
    assert events[1] > 3 * events[0]
    assert calls[1] <= 1.5 * calls[0]


@pytest.mark.parametrize("history", [5, 30])
def test_windows_of_more_users_take_no_more_functions_and_no_generators(monkeypatch, history):
    generators = []
    monkeypatch.setattr("nonet.random.rng", lambda *words: generators.append(words))
    calls, cut = [], []
    for users in (20, 400):
        seq = _sequences(users=users, events=40 * users, split={"test": 1})
        args = {"history": history, "stage": "s", "epoch": 0, "seed": 0}
        cut_windows(seq, np.arange(len(seq)), **args)
        profile = cProfile.Profile()
        profile.enable()
        row, _, _ = cut_windows(seq, np.arange(len(seq)), **args)
        profile.disable()
        calls.append(sum(entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str)))
        cut.append(len(row))
    assert cut[1] > 10 * cut[0]
    assert calls[1] == calls[0]  # a user's draw is a hash, which is no function of Python's
    assert not generators
