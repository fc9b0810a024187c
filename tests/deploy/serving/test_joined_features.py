"""Runs whose model reads joined columns are refused where these are not read, in one line and before anything is written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from served_run import TrainedRun

from nonet.controller.plan.resolved import resolve_run
from nonet.controller.plan.warnings import _list_warnings
from nonet.controller.scenario import check_supported, load_scenario
from nonet.controller.scenario.unsupported import list_joined_features
from nonet.deploy.serving.offline import export_run, recommend_all
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app, serve_run
from nonet.errors import ConfigError

JOIN = {"item": {"use": "lmdb:prices", "columns": ["discount", "now_price"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    served = TrainedRun(tmp_path_factory.mktemp("served"), memory=False)
    served.commit(1)
    body = yaml.safe_load(served.folder.scenario.read_text())
    body["data"]["join"] = JOIN
    body["sparse"]["tables"]["discount"] = {"dim": 4}
    served.folder.scenario.write_text(yaml.safe_dump(body))
    return served.folder


@pytest.mark.parametrize("verb", ["serve", "build", "export", "recommend --users"])
def test_a_run_with_joined_features_is_refused_and_nothing_is_written(run, tmp_path, verb):
    users = tmp_path / "users.parquet"
    pq.write_table(pa.table({"user_id": [101]}), users)
    before = sorted(Path(run.path).rglob("*"))
    ask = {
        "serve": lambda: serve_run(str(run.path)),
        "build": lambda: build_single_process_app(str(run.path), ServeConfig(), True),
        "export": lambda: export_run(str(run.path), tmp_path / "out"),
        "recommend --users": lambda: recommend_all(str(run.path), users, tmp_path / "out.parquet", 3, 1),
    }[verb]
    with pytest.raises(
        ConfigError, match=r"reads discount from data\.join, which is not supported here yet; train a run"
    ) as error:
        ask()
    assert "\n" not in str(error.value)
    assert sorted(Path(run.path).rglob("*")) == before
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.parquet").exists()


def test_columns_that_only_rewards_read_are_no_features(run):
    scenario, _ = load_scenario(run.scenario)
    assert list_joined_features(scenario) == ["discount"]
    del scenario.sparse.tables["discount"]
    assert list_joined_features(scenario) == []
    check_supported(scenario, "serve", "run")


def test_a_plan_warns_of_it(run):
    from types import SimpleNamespace

    scenario, _ = load_scenario(run.scenario)
    trainer = SimpleNamespace(
        roles=("trainer",), workers=1, resource="CPU", shares=None, device="cpu", name="trainer"
    )
    said = [line for line in _list_warnings(resolve_run(scenario), None, (trainer,)) if "data.join" in line]
    assert said == [
        "warning: a run of ring will not have recommend --users, serve, /recommend, /score, export: it reads discount from "
        "data.join, which is not supported here yet; train a run without sparse.tables for it, or use: nonet recommend --user"
    ]
