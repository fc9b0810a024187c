import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import ConfigError
from nonet.samples.batches.prompt_rows import gather_seen_items, list_prompts, locate_events
from nonet.samples.batches.steps import select_step_prompts, select_step_rows
from nonet.samples.ledger.order import EpochSteps
from nonet.samples.sequences.sequences import RL, TEST, Sequences, build_sequences
from nonet.samples.sources._prompts import RlPrompts


def steps_per_epoch(rows: int, size: int) -> int:
    return EpochSteps(rows, size, size).steps_per_epoch


def _sequences(rl: int = 3) -> Sequences:
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user_id": rng.integers(0, 20, 400),
            "item_id": rng.integers(0, 30, 400),
            "timestamp": rng.permutation(400),
        }
    )
    return build_sequences(log, None, split={"test": 2, "rl": rl})[0]


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (9, 3), (1, 4), (7, 7), (100, 1)])
def test_every_epoch_consumes_each_row_once_and_no_step_spans_two(rows, size):
    per_epoch = steps_per_epoch(rows, size)
    for epoch in range(3):
        steps = [select_step_rows(rows, size, 7, "pretrain", epoch * per_epoch + i) for i in range(per_epoch)]
        assert [e for e, _ in steps] == [epoch] * per_epoch
        assert sorted(np.concatenate([r for _, r in steps]).tolist()) == list(range(rows))
        assert all(len(r) == size for _, r in steps[:-1])
        assert 0 < len(steps[-1][1]) <= size


def test_step_is_a_pure_function_of_its_number_so_a_resumed_run_sees_the_same_rows():
    forward = [select_step_rows(50, 8, 7, "pretrain", step)[1].tolist() for step in range(30)]
    for step in (29, 3, 17, 0):
        assert select_step_rows(50, 8, 7, "pretrain", step)[1].tolist() == forward[step]


def test_order_differs_between_epochs_stages_and_seeds():
    one = select_step_rows(50, 50, 7, "pretrain", 0)[1].tolist()
    others = [
        select_step_rows(50, 50, 7, "pretrain", 1),
        select_step_rows(50, 50, 7, "finetune", 0),
        select_step_rows(50, 50, 8, "pretrain", 0),
    ]
    assert all(rows.tolist() != one for _, rows in others)


@pytest.mark.parametrize(("rows", "size"), [(0, 3), (3, 0)])
def test_nothing_to_consume_is_a_config_error(rows, size):
    with pytest.raises(ConfigError, match="at least 1"):
        select_step_rows(rows, size, 7, "pretrain", 0)


def test_each_rl_event_is_a_prompt_once_an_epoch():
    seq = _sequences()
    total = int((seq.split == RL).sum())
    asked = []
    for step in range(steps_per_epoch(total, 7)):
        epoch, users, positions = select_step_prompts(seq, 7, 1, "rl", step)
        assert epoch == 0
        asked += locate_events(seq, users, positions).tolist()
    assert sorted(asked) == np.flatnonzero(seq.split == RL).tolist()


def test_prompts_can_be_narrowed_to_some_events():
    seq = _sequences()
    some = np.isin(seq.user, [2, 5])
    _, users, _ = select_step_prompts(seq, 100, 1, "rl", 0, event_mask=some)
    assert sorted(users.tolist()) == [2, 2, 2, 5, 5, 5]


def test_rl_without_rl_events_says_what_to_set():
    with pytest.raises(ConfigError, match=r"set split\.rl"):
        select_step_prompts(_sequences(rl=0), 4, 1, "rl", 0)


def test_prompts_are_the_events_of_a_split_and_seen_is_all_before_them():
    seq = _sequences()
    users, positions = list_prompts(seq, TEST)
    np.testing.assert_array_equal(locate_events(seq, users, positions), np.flatnonzero(seq.split == TEST))
    before = gather_seen_items(seq, users, positions)
    assert len(before) == len(users)
    for i in range(len(users)):
        start = seq.offsets[users[i]]
        np.testing.assert_array_equal(before[i], seq.item[start : start + positions[i]])
    assert before.values.dtype == np.int64


def test_prompts_of_a_step_are_picked_without_looking_at_all_events_again(monkeypatch):
    seq = _sequences()
    prompts = RlPrompts(seq, 7, "rl", 4)
    first = [prompts.get_step_prompts(step) for step in range(3)]
    searches = []
    monkeypatch.setattr(
        "nonet.samples.sequences.sequences.Sequences.find_split_events",
        lambda *_: searches.append(1) or np.zeros(0, np.int64),
    )
    again = [prompts.get_step_prompts(step) for step in range(3)]
    assert not searches
    for (users, positions), (users_again, positions_again) in zip(first, again, strict=True):
        assert users.tolist() == users_again.tolist()
        assert positions.tolist() == positions_again.tolist()
