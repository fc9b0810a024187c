"""`nonet reward test`: a reward beside the scenario's others, a wrong shape with what came back, and nothing heavy is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests_ring import make_ring

from nonet.deploy.after.trial import format_trial, summarise_trial, try_reward
from nonet.deploy.run import api
from nonet.errors import ConfigError
from nonet.samples.stores import PackedStore

OWN = """
import numpy as np
import nonet


@nonet.reward
def odd(item):
    return item % 2


@nonet.reward
def flat(item):
    return np.ones(len(item))
"""

PRICE = """
import nonet


@nonet.reward
def price(price):
    return price
"""


WRONG = """
import nonet


class Wrong(nonet.Reward):
    columns = ["COLUMN"]

    def score(self, r):
        return r["COLUMN"]
"""


def test_a_wrong_shape_is_told_with_what_came_back_and_neither_torch_nor_ray_is_loaded(tmp_path):
    folder = make_ring(tmp_path)
    (folder / "own.py").write_text(OWN)
    code = (
        "import sys; sys.argv = ['nonet', 'reward', 'test', 'own.py:flat', '--scenario', 'ring.yaml']\n"
        "from nonet.deploy.cli import main\n"
        "try: main()\nfinally: assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=os.environ
    )
    assert (done.returncode, done.stderr) == (1, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("no score for any user: reward 'flat' returned numpy.ndarray of shape [8] float64")
    assert "wanted numbers of shape [8, 16], [users, beams]" in last


def test_a_reward_is_compared_with_those_of_the_scenario(tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    (folder / "own.py").write_text(OWN)
    monkeypatch.chdir(folder)
    found = try_reward(api.scenario(folder / "ring.yaml"), "own.py:odd", 0.5, {}, 8)
    facts = summarise_trial(found)
    assert (facts["reward"], len(facts["users"]), facts["troubles"]) == ("odd", 8, [])
    assert "hit" in facts["correlation"]
    assert "share of the weighted spread" in format_trial(found)


def test_a_reward_of_the_scenario_is_not_compared_with_itself_under_another_name(tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    monkeypatch.chdir(folder / "rewards")
    scenario = api.scenario(
        folder / "ring.yaml", ["stages.rl.rewards.mine={use: rewards/own.py, weight: 0.1, ceiling: 9}"]
    )
    found = try_reward(scenario, "own.py", None, {}, 8)
    assert set(summarise_trial(found)["correlation"]) == {"hit"}
    assert "not compared with mine: it is the same reward" in format_trial(found)


def test_a_reward_of_the_scenario_is_tried_with_its_weight_and_options_there(tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    monkeypatch.chdir(folder / "rewards")
    scenario = api.scenario(folder / "ring.yaml")
    by_file, by_name = (try_reward(scenario, use, None, {}, 8) for use in ("own.py:own", "own"))
    assert summarise_trial(by_file)["scores"] == summarise_trial(by_name)["scores"]
    assert "the scenario's reward, with weight 0.5, ceiling 20\n" in format_trial(by_file)
    changed = summarise_trial(try_reward(scenario, "own.py", 2.0, {"ceiling": 1}, 8))
    assert (changed["reward"], changed["weight"], changed["options"]) == ("own", 2.0, {"ceiling": 1})
    assert np.sum(changed["scores"]) < by_file.trial.scores["own"].sum()


def test_a_draft_is_compared_with_the_reward_of_the_same_name_in_the_scenario(tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    (folder / "own.py").write_text(OWN.replace("odd", "own"))
    monkeypatch.chdir(folder)
    found = summarise_trial(try_reward(api.scenario(folder / "ring.yaml"), "own.py:own", None, {}, 8))
    assert (found["reward"], found["weight"], set(found["correlation"])) == (
        "own.py:own",
        1.0,
        {"hit", "own"},
    )


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("history", "history is a field of nonet.Rollouts, not a column; read r.history"),
        ("kind", "data.columns maps 'kind' to 'categories': ask for that name"),
        ("titel", "Did you mean 'title'"),
    ],
)
def test_a_wrong_column_of_a_class_is_refused_with_the_right_name(tmp_path, monkeypatch, column, message):
    folder = make_ring(tmp_path)
    items = pq.read_table(folder / "items.parquet").rename_columns(["item_id", "title", "kind"])
    pq.write_table(items, folder / "items.parquet")
    (folder / "wrong.py").write_text(WRONG.replace("COLUMN", column))
    monkeypatch.chdir(folder)
    scenario = api.scenario(folder / "ring.yaml", ["data.columns={categories: kind}"])
    with pytest.raises(ConfigError, match=message):
        try_reward(scenario, "wrong.py", None, {}, 8)


def test_a_reward_sees_joined_columns_as_of_each_prompts_time(tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    store = PackedStore.create(
        folder / "prices", pa.schema([("price", pa.float64())]), key=pa.int64(), versions=True
    )
    ids = np.arange(1000, 1040)
    for time, price in ((0, 1.0), (10**9, 2.0)):  # the second is of long after the log
        values = pa.table({"price": np.full(len(ids), price)})
        store.put(ids, values, np.full(len(ids), time))
    (folder / "price.py").write_text(PRICE)
    monkeypatch.chdir(folder)
    joined = f"data.join={{item: {{use: '{folder / 'prices'}', columns: [price]}}}}"
    found = try_reward(api.scenario(folder / "ring.yaml", [joined]), "price.py", 0.5, {}, 8)
    assert found.trial.troubles == []
    assert set(np.unique(found.trial.scores["price"])) == {1.0}
