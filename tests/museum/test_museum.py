"""What commit fe1e6d5, a Nonet 0.1, left behind: its runs are refused by every verb, its store and its exports open."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from exhibits import NAMES, open_exhibit

from nonet.controller.record import RunFolder
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.deploy.serving.offline import Exported
from nonet.samples.stores import open_store

RUNS = ("shop", "stopped", "clicks", "hugging_face", "mine")
REFUSAL = "is a run of Nonet 0.1, and this version opens runs of 0.2 and later; open it with Nonet 0.1, or run its scenario again"
VERBS = {
    "attach": ["RUN", "--reward", "hit", "--weight", "1"],
    "detach": ["RUN", "own"],
    "evaluate": ["RUN"],
    "export": ["RUN", "DIR"],
    "items add": ["RUN", "FILE"],
    "logs": ["RUN"],
    "promote": ["RUN@1"],
    "publish": ["RUN", "--step", "6"],
    "recommend": ["RUN", "--user", "user_003"],
    "report": ["RUN"],
    "resume": ["RUN"],
    "rollback": ["RUN"],
    "scale": ["RUN", "trainer=1"],
    "score": ["RUN", "--data", "FILE", "--out", "DIR"],
    "serve": ["RUN"],
    "set": ["RUN", "stages.rl.rewards.own.weight=0.1"],
    "status": ["RUN"],
    "stop": ["RUN"],
    "store append": ["RUN", "FILE"],
    "tradeoff": ["RUN", "stages.rl.rewards.own.weight=0.1,0.2"],
    "versions": ["RUN"],
    "why": ["RUN"],
    "plan": ["quickstart", "--set", "init.from=RUN"],
}


@pytest.fixture(scope="module")
def museum(tmp_path_factory):
    """Each exhibit in a folder of its own, by name."""
    root = tmp_path_factory.mktemp("museum")
    return {name: open_exhibit(name, root / name) for name in NAMES}


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_of_0_1_is_refused_in_one_line_by_every_verb_that_opens_a_run(museum, command, tmp_path, verb):
    run, table = museum["shop"] / "shop", museum["shop"] / "data" / "log.parquet"
    places = {"RUN": str(run), "FILE": str(table), "DIR": str(tmp_path / "out")}
    words = [re.sub("RUN|FILE|DIR", lambda match: places[match[0]], word) for word in VERBS[verb]]
    code, _, err = command(*verb.split(), *words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.endswith(f"{run} {REFUSAL}")


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_0_1_of_every_kind_are_refused(museum, command, name):
    code, _, err = command("report", museum[name] / name)
    assert (code, REFUSAL in err) == (2, True)


def test_the_runs_of_this_machine_are_listed_with_those_of_0_1(museum, command, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(museum["shop"]))
    code, out, _ = command("runs")
    assert (code, "shop" in out) == (0, True)


@pytest.mark.parametrize("name", ["export", "export_hugging_face"])
def test_an_export_of_format_1_opens(museum, name):
    lists = Exported(museum["exports"] / name).recommend(["SKU-0001", "SKU-0002"], k=5)
    assert len({item for item, _, _ in lists}) == 5


def test_a_packed_store_answers(museum):
    store = open_store(str(museum["store"] / "discounts.store"))
    values, offsets = store.multi_get(["SKU-0003", "none"], ["discount"], as_of=[1_700_100_000] * 2)
    assert np.diff(offsets).tolist() == [1, 0]
    assert 0 <= values["discount"][0].as_py() <= 1


def test_artifacts_are_written_relative_to_the_run(tmp_path):
    run = RunFolder(tmp_path / "run")
    place = run.path / "artifacts" / "sids-1"
    place.mkdir(parents=True)
    run.write_facts({"artifacts": {"sids": {"kind": "sids", "path": str(place), "sha256": ""}}})
    stored = json.loads((run.path / "results" / "tokenise.json").read_text())
    assert stored["artifacts"]["sids"]["path"] == "artifacts/sids-1"
    run.path.rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").find_artifacts() == {
        "sids": str(tmp_path / "moved/artifacts/sids-1")
    }


@pytest.mark.slow
def test_a_scenario_of_0_1_runs_again_on_ray(no_ray, museum, tmp_path):
    scenario = api.scenario(museum["clicks"] / "clicks.yaml", [])
    done = api.run(scenario, run_dir=tmp_path / "again", panel=Panel(io.StringIO(), live=False))
    assert done.folder.report.exists()
