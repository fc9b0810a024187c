"""A table of users answered at once, and a run in a folder that needs no Ray: the answers of the server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_run import TrainedRun

from nonet import yaml
from nonet.deploy.opened import RequestFeatures, UserHistories
from nonet.deploy.serving.offline import Exported, export_run, recommend_all
from nonet.errors import ConfigError, DataError
from nonet.models.inference import InferenceEngine


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = TrainedRun(tmp_path_factory.mktemp("served"))
    made.commit(6)
    return made


def answers(served, users, top):
    run = served.open()
    engine = InferenceEngine(run.load_recommender(run.registry.read_version(1)), 1)
    features = RequestFeatures(
        run.corpus, UserHistories(run.corpus, None), run.setup.history, run.scenario.evaluate.width
    )
    asked = [features.make_list_question(str(user), None, top) for user in users]
    return [
        (features.items.get_ids(a.item), a.score)
        for a in (engine.answer([each.question])[0] for each in asked)
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_user_gets_what_the_server_answers_in_the_order_of_the_file(served, tmp_path, workers):
    users = [*range(150, 99, -1), 7]
    rows = [*users[:20], *users]  # some users have two rows
    pq.write_table(pa.table({"user_id": rows, "other": rows}), tmp_path / "users.parquet")
    out = tmp_path / "out.parquet"
    done = recommend_all(str(served.folder.path), tmp_path / "users.parquet", out, 4, workers, chunk=10)
    table = pq.read_table(out)
    assert done["users"] == len(users) == len(table)
    assert table["user_id"].to_pylist() == users
    assert table["cold_start"].to_pylist() == [False] * 51 + [True]
    alone = answers(served, users, 4)
    for row, (items, scores) in zip(table.to_pylist(), alone, strict=True):
        assert row["item_id"] == items
        np.testing.assert_allclose(row["score"], scores, atol=1e-5)


def test_answers_have_the_column_names_of_the_log(served, tmp_path):
    run = shutil.copytree(served.folder.path, tmp_path / "run")
    document = yaml.read(run / "scenario.yaml")
    document["data"]["columns"] = {"user": "member", "item": "sku"}
    (run / "scenario.yaml").write_text(yaml.dump(document))
    pq.write_table(pa.table({"member": [101]}), tmp_path / "users.parquet")
    recommend_all(str(run), tmp_path / "users.parquet", tmp_path / "out.parquet", 4, 1)
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["member"] == 101
    assert len(row["sku"]) == 4
    assert not {"user_id", "item_id"} & row.keys()


def test_files_that_cannot_be_read_are_named_and_nothing_is_written(served, tmp_path):
    pq.write_table(pa.table({"uid": [1]}), tmp_path / "users.parquet")
    with pytest.raises(DataError, match="no column 'user_id', in which the run has the user"):
        recommend_all(str(served.folder.path), tmp_path / "users.parquet", tmp_path / "out.parquet", 4, 1)
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"users .*text\.parquet"):
        recommend_all(str(served.folder.path), tmp_path / "text.parquet", tmp_path / "out.parquet", 4, 1)
    assert not (tmp_path / "out.parquet").exists()


def test_an_export_answers_as_the_server_does_and_its_example_runs_without_ray(served, tmp_path):
    target = tmp_path / "export"
    export_run(str(served.folder.path), target)
    exported = Exported(target)
    run = served.open()
    engine = InferenceEngine(run.load_recommender(run.registry.read_version(1)), 1)
    features = RequestFeatures(
        run.corpus, UserHistories(run.corpus, None), run.setup.history, run.scenario.evaluate.width
    )
    answer = engine.answer([features.make_list_question(None, [1001, 1002], 5).question])[0]
    found = exported.recommend([1001, 1002], k=5)
    assert [item for item, _, _ in found] == features.items.get_ids(answer.item)
    np.testing.assert_allclose([score for _, _, score in found], answer.score, atol=1e-5)
    example = str(target / "example.py")
    code = (
        f"import sys, runpy; sys.modules['ray'] = None; sys.argv[1:] = ['1001']; runpy.run_path({example!r})"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert text.startswith("after item b1")
    assert len(text.splitlines()) == 11
    with pytest.raises(ConfigError, match="already exists"):
        export_run(str(served.folder.path), target)
    with pytest.raises(DataError, match="has no export"):
        Exported(tmp_path)


OWN = """
import json
from nonet.plug import Exporter

def write(version, folder):
    names = list(version.build_model().state_dict())
    facts = {"version": version.version, "weights": names, "rows": sorted(version.merge_rows())}
    (folder / "facts.json").write_text(json.dumps(facts))

FACTS = Exporter(write)
SHORT = Exporter(lambda version: None)
"""


def test_an_exporter_from_a_file_writes_its_own_form(served, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    written = export_run(str(served.folder.path), tmp_path / "out", form=f"{tmp_path}/own.py:FACTS")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["facts.json"]
    assert written["bytes"] == (tmp_path / "out" / "facts.json").stat().st_size
    facts = json.loads((tmp_path / "out" / "facts.json").read_text())
    assert (facts["version"], facts["rows"]) == (1, ["item", "user"])
    assert facts["weights"]


def test_an_exporter_that_breaks_its_contract_is_refused_before_a_folder_is_made(served, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(
        ConfigError, match=r"own.py\): write does not accept \(version.*see docs/how-to/extend.md"
    ):
        export_run(str(served.folder.path), tmp_path / "out", form=f"{tmp_path}/own.py:SHORT")
    assert not (tmp_path / "out").exists()
