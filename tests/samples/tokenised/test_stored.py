import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.sequences import build_sequences
from nonet.samples.tokenised import StoredSequences

FOLDERS = {"sequences": "/x/sequences-0a1b2c3d", "sids": "/x/sids-99887766"}


def sequences(text: bool = False):
    rng = np.random.default_rng(3)
    users, items = rng.integers(0, 30, 900), rng.integers(0, 40, 900)
    table = pa.table(
        {
            "user_id": [f"u{user}" for user in users] if text else users,
            "item_id": items,
            "timestamp": 1_700_000_000 + rng.integers(0, 10**6, 900),
            "event": [["view", "buy"][n] for n in rng.integers(0, 2, 900)],
            "price": rng.random(900).astype(np.float32),
            "shop": rng.integers(0, 5, 900),
        }
    )
    split = {"use": "leave_last_out", "valid": 1, "test": 1}
    seq, _ = build_sequences(table, None, split=split, targets={"rl": "event == 'buy'"})
    return seq


@pytest.mark.parametrize("use", ["{}/s", "lmdb:{}/s"])
@pytest.mark.parametrize("text", [False, True])
def test_every_event_comes_back_bit_for_bit_also_after_others_were_appended(tmp_path, use, text):
    seq = sequences(text)
    stored = StoredSequences(use=use.format(tmp_path))
    assert stored.write(seq, FOLDERS) == f"{use.format(tmp_path)}-0a1b2c3d-99887766"
    stored.write(seq, FOLDERS)  # a resumed run
    events = stored.open_events(FOLDERS, seq)
    someone = seq.user_id[4]
    new = {"item": np.array([7, 9]), "time": np.array([5, 6]), "event": np.array([0, 1])}
    assert events.append([someone, "99999"], new) == 2
    read = stored.open_events(FOLDERS, seq).load_sequences()
    for name in ("item", "time", "event", "split", "user_id", "offsets"):
        assert getattr(read, name).tolist() == getattr(seq, name).tolist(), name
        assert getattr(read, name).dtype == getattr(seq, name).dtype, name
    for name, values in seq.columns.items():
        assert read.columns[name].tobytes() == values.tobytes(), name
    assert read.targets["rl"].tolist() == seq.targets["rl"].tolist()
    mine = events.get_user_events(str(someone))
    first, last = seq.offsets[4], seq.offsets[5]
    assert mine["item"].tolist() == [*seq.item[first:last].tolist(), 7]
    assert events.get_user_events("99999")["time"].tolist() == [6]
    assert events.get_user_events("nobody") is None


def test_events_are_mapped_and_read_from_the_store_a_few_users_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.samples.tokenised.stored._PART_EVENTS", 50)
    seq = sequences()
    stored = StoredSequences(use=str(tmp_path / "s"))
    stored.write(seq, FOLDERS)
    events = stored.open_events(FOLDERS, seq)
    asked: list[int] = []
    read_from_store = events.store.multi_get

    def multi_get(keys, *more):
        asked.append(len(keys))
        return read_from_store(keys, *more)

    monkeypatch.setattr(events.store, "multi_get", multi_get)
    read = events.load_sequences(tmp_path / "artifacts" / "stored-1")
    every = [read.item, read.time, read.event, read.split, *read.columns.values(), *read.targets.values()]
    assert all(isinstance(values, np.memmap) for values in every)
    assert max(asked) <= 3
    assert read.item.tolist() == seq.item.tolist()
    asked.clear()
    again = events.load_sequences(tmp_path / "artifacts" / "stored-1")
    assert not asked, "a second process maps the files of the first"
    assert again.columns["price"].tobytes() == seq.columns["price"].tobytes()
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["stored-1"]


def test_a_copy_that_fails_leaves_no_files(tmp_path):
    seq = sequences()
    stored = StoredSequences(use=str(tmp_path / "s"))
    stored.write(seq, FOLDERS)
    other = sequences()
    other.__dict__["user_id"] = other.user_id + 1000
    with pytest.raises(DataError, match="user 1000 is missing"):
        stored.open_events(FOLDERS, other).load_sequences(tmp_path / "artifacts" / "stored-1")
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_semantic_ids_are_not_written(tmp_path):
    seq = sequences()
    stored = StoredSequences(use=str(tmp_path / "s"))
    stored.write(seq, FOLDERS)
    assert "sid" not in stored.open_events(FOLDERS, seq).store.schema.names


def test_a_user_who_is_missing_is_named(tmp_path):
    seq = sequences()
    stored = StoredSequences(use=str(tmp_path / "s"))
    stored.write(seq, FOLDERS)
    other = sequences()
    other.__dict__["user_id"] = other.user_id + 1000
    with pytest.raises(DataError, match="user 1000 is missing; run the tokenise stage again"):
        stored.open_events(FOLDERS, other).load_sequences()
