"""Tables that come after a run are read with the run's `data.missing`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import load_scenario

evaluate = importlib.import_module("nonet.deploy.after.evaluate")  # the face has a function of this name
items = importlib.import_module("nonet.deploy.after.items")
appending = importlib.import_module("nonet.deploy.opened.appending")

SCENARIO = """
name: visits
data: {interactions: visits.parquet, missing: ['?']}
stages: {pretrain: {epochs: 1}}
"""


class _ReadError(Exception):
    """Raised by a reader that was called, to stop there."""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "visits.yaml").write_text(SCENARIO)
    scenario, _ = load_scenario(tmp_path / "visits.yaml")
    return SimpleNamespace(scenario=scenario, path=tmp_path, id="visits")


def recorder(formats: list):
    """Make a reader that notes the format it is called with."""

    def read(*arguments, **_):
        formats.append(arguments[-1])
        raise _ReadError

    return read


def test_other_events_are_evaluated_with_the_run_s_missing_texts(run, monkeypatch):
    formats: list = []
    monkeypatch.setattr(evaluate, "read_tables", recorder(formats))
    with pytest.raises(_ReadError):
        evaluate._load_other_data(None, run.scenario, run, run.path / "other.parquet")
    assert formats[0].missing == ("?",)


def test_events_are_appended_with_the_run_s_missing_texts(run, monkeypatch):
    formats: list = []
    opened = SimpleNamespace(scenario=run.scenario, events=object(), corpus=SimpleNamespace(seq=None))
    monkeypatch.setattr(appending, "read_interactions", recorder(formats))
    monkeypatch.setattr(appending.OpenedRun, "open", lambda _, verb: opened)
    with pytest.raises(_ReadError):
        appending.append_events("visits", "more.parquet")
    assert formats[0].missing == ("?",)


def test_new_items_may_have_ids_that_the_run_s_list_allows(run):
    pq.write_table(pa.table({"item_id": ["NA", "b"]}), run.path / "new.parquet")
    known, ids = pa.table({"item_id": ["a"]}), np.array(["a"])
    rows = items._read_new_items(
        str(run.path / "new.parquet"), run.scenario.data.missing, known, ids, np.ones(1, bool)
    )
    assert rows["item_id"].to_pylist() == ["NA", "b"]
