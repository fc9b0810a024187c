"""Tables that come after a run are read with the run's `data.missing` and `data.columns`, or with columns that the user names."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.deploy.opened import Vocabulary, vocabulary
from nonet.errors import ConfigError, DataError
from nonet.samples.tables import IdKind

evaluate = importlib.import_module("nonet.deploy.after.evaluate")  # the face has a function of this name
items = importlib.import_module("nonet.deploy.after.items")
appending = importlib.import_module("nonet.deploy.after.append")
VOCABULARY = Vocabulary(IdKind(True, True), IdKind(True, True), columns={"item": "sku"}, missing=("?",))


class _ReadError(Exception):
    """Raised by a reader that was called, to stop there."""


@pytest.fixture
def formats(monkeypatch):
    """Return the formats with which interactions are checked, which is where reading ends."""
    noted: list = []

    def check(_, table_format, label):
        noted.append(table_format)
        raise _ReadError

    monkeypatch.setattr(vocabulary, "check_interactions", check)
    return noted


@pytest.fixture
def events(tmp_path):
    pq.write_table(pa.table({"user_id": ["NA"], "sku": ["b"], "timestamp": [1]}), tmp_path / "more.parquet")
    return tmp_path / "more.parquet"


def test_other_events_are_evaluated_with_the_run_s_missing_texts(formats, events, monkeypatch):
    monkeypatch.setattr(
        evaluate,
        "make_data_setup",
        lambda *_: SimpleNamespace(labels=(), attach_labels=lambda table: table),
    )
    opened = SimpleNamespace(vocabulary=VOCABULARY, scenario=None, folder=SimpleNamespace(path=events.parent))
    with pytest.raises(_ReadError):
        evaluate._load_other_data(None, opened, str(events))
    assert formats[0].missing == ("?",)
    assert formats[0].columns == {"item": "sku"}


def test_events_are_appended_with_the_run_s_missing_texts(formats, events, monkeypatch):
    opened = SimpleNamespace(vocabulary=VOCABULARY, events=object(), corpus=SimpleNamespace(seq=None))
    monkeypatch.setattr(appending.OpenedRun, "open", lambda _, verb: opened)
    with pytest.raises(_ReadError):
        appending.append_events("visits", str(events))
    assert formats[0].missing == ("?",)


def test_new_items_may_have_ids_that_the_run_s_list_allows(tmp_path):
    pq.write_table(pa.table({"sku": ["NA", "b"]}), tmp_path / "new.parquet")
    (tmp_path / "new.csv").write_text("sku\nNA\nb\n")
    known, ids = pa.table({"item_id": ["a"]}), np.array(["a"])
    for name in ("new.parquet", "new.csv"):
        rows = items._read_new_items(str(tmp_path / name), VOCABULARY, known, ids, np.ones(1, bool))
        assert rows["item_id"].to_pylist() == ["NA", "b"]


def test_lists_of_delimited_text_are_parted_by_bars(tmp_path):
    (tmp_path / "new.csv").write_text("sku,department\nb,fruit\nc,dairy|organic\n")
    kind = pa.list_(pa.string())
    known = pa.table({"item_id": ["a"], "department": pa.array([["fruit"]], kind)})
    table = str(tmp_path / "new.csv")
    rows = items._read_new_items(table, VOCABULARY, known, np.array(["a"]), np.ones(1, bool))
    assert rows["department"].to_pylist() == [["fruit"], ["dairy", "organic"]]


def test_a_table_without_the_run_s_column_is_refused_with_the_name_of_the_column(tmp_path):
    pq.write_table(pa.table({"article": ["b"]}), tmp_path / "new.parquet")
    with pytest.raises(DataError, match="no column 'sku', in which the run has the item") as error:
        vocabulary.read_run_items(str(tmp_path / "new.parquet"), VOCABULARY)
    assert "\n" not in str(error.value)


def test_columns_of_a_later_table_may_be_named_and_a_refusal_says_how(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("viewer,film,at,act\n007,b,1600000000,play\n")
    columns = {"user": "viewer", "item": "film", "timestamp": "at", "event": "act"}
    table = vocabulary.read_run_interactions(str(path), VOCABULARY, columns=columns)
    own_names = {"user_id": "007", "item_id": "b", "timestamp": 1_600_000_000, "event": "play"}
    assert table.to_pylist() == [own_names]
    assert list(vocabulary.iterate_user_ids(path, VOCABULARY, 5, {"user": "viewer"})) == [["007"]]
    with pytest.raises(DataError, match=r"Rename the column to user_id, or name it: --column user=NAME\."):
        vocabulary.read_run_interactions(str(path), VOCABULARY, columns={})
    with pytest.raises(DataError, match=r"--column user=vewer: users .* it has .*Did you mean 'viewer'"):
        list(vocabulary.iterate_user_ids(path, VOCABULARY, 5, {"user": "vewer"}))
    with pytest.raises(ConfigError, match="--column names columns of the table of --data"):
        evaluate.evaluate_run("last", columns=columns)
