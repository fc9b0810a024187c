"""`nonet new --missing`: the texts that stand for a missing value, from the command line to the tables of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import to_document
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import ConfigError
from nonet.samples.sequences import TRAIN

from .test_new_from_data import as_csv, log, runs

COUNTRIES = ("NA", "DE", "FR", "PE", "None")


def visits() -> pa.Table:
    """Make a log whose users are countries, two of them named like missing values."""
    table = log()
    users = [COUNTRIES[user % 5] if user < 5 else f"C{user}" for user in table["uid"].to_pylist()]
    return table.set_column(table.column_names.index("uid"), "uid", pa.array(users))


def write_visits(form: str) -> str:
    path = f"visits.{form}"
    if form == "csv":
        as_csv(visits(), path)
    elif form == "parquet":
        pq.write_table(visits(), path)
    else:
        Path(path).write_text("".join(json.dumps(row, default=str) + "\n" for row in visits().to_pylist()))
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_users_called_as_missing_values_stay_where_the_option_says_so(new, refused, form):
    path = write_visits(form)
    assert "--missing" in refused("mine.yaml", "--data", path)
    code, _, err = new("mine.yaml", "--data", path, "--missing", "")
    assert code == 0, err
    scenario = runs()
    assert scenario.data.missing == [""]
    seq, _ = make_data_setup(scenario, Path()).build()
    assert len(seq) == 80
    assert (seq.split == TRAIN).any()


def test_the_option_may_be_repeated_and_replaces_the_whole_list(new, refused):
    path = write_visits("csv")
    words = ("mine.yaml", "--data", path, "--missing", "", "--missing", "PE", "--missing", "PE")
    assert "'PE' there" in refused(*words)
    assert new(*words[:5], "--missing", "?")[0] == 0
    assert runs().data.missing == ["", "?"]


def test_formats_without_the_option_refuse_it_in_one_line(refused):
    Path("folder").mkdir()
    Path("folder/sequences.txt").write_text("1 2 3 4\n2 3 4 5\n")
    assert "--missing" in refused("mine.yaml", "--data", "folder", "--missing", "?")
    assert "need --data" in refused("quickstart", "mine.yaml", "--missing", "?")


def test_a_list_with_a_text_twice_is_refused(new):
    assert new("mine.yaml", "--data", write_visits("csv"), "--missing", "")[0] == 0
    with pytest.raises(ConfigError, match="'b' is listed more than once"):
        runs(changes=["data.missing=[a, b, b]"])


def test_labels_are_read_by_the_list(new):
    assert new("mine.yaml", "--data", write_visits("parquet"), "--missing", "")[0] == 0
    pq.write_table(visits().filter(pa.array([True] * 40 + [False] * (len(visits()) - 40))), "later.parquet")
    scenario = runs(changes=["data.labels={path: later.parquet, within: 1h, name: bought}"])
    setup = make_data_setup(scenario, Path())
    assert setup.labels is not None
    seq, _ = setup.build()
    assert len(seq) == 80


def test_a_run_without_the_key_has_the_same_document_as_before(new):
    as_csv(log(), "log.csv")
    assert new("mine.yaml", "--data", "log.csv")[0] == 0
    assert "missing" not in to_document(runs())["data"]
