"""`nonet new FILE --data DIR --target CONDITION`: the scenario of a click model for tables of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.controller.scenario import load_scenario
from nonet.controller.setup import preflight


def log(users=80, each=8, items=30, **columns):
    table = {
        "uid": np.repeat(np.arange(users), each),
        "sku": np.arange(users * each) * 7 % items,
        "ts": np.tile(np.arange(each) * 3600, users) + 1_600_000_000,
    }
    return pa.table(table | columns)


def runs():
    """Return the scenario after all checks that precede a run."""
    scenario, folder = load_scenario("mine.yaml")
    preflight.check(scenario, folder)
    return scenario


def things(items=30):
    return pa.table(
        {
            "sku": np.arange(items),
            "name": [f"thing {i} (19{50 + i})" for i in range(items)],
            "brand": [f"brand {i % 4}" for i in range(items)],
            "text": [f"all about thing {i}" for i in range(items)],
            "price": [1 + i % 5 + i / 1000 for i in range(items)],
            "sizes": [[1.0, 2.0]] * items,
            "clicked": [i % 2 for i in range(items)],
        }
    )


def test_a_target_makes_the_scenario_of_a_click_model_without_a_reward(new):
    Path("data").mkdir()
    pq.write_table(log(clicked=np.arange(640) % 3 % 2), "data/events.parquet")
    pq.write_table(things(), "data/things.parquet")
    code, out, err = new("mine.yaml", "--data", "data", "--target", "clicked == 1")
    assert code == 0, err
    assert "wrote mine.yaml\n" in out
    assert not Path("rewards").exists()
    scenario = runs()
    assert scenario.model.use == "deepfm"
    assert scenario.stages["train"].target == "clicked == 1"  # type: ignore[attr-defined]
    assert scenario.stages["train"].batch.tokens == 64  # type: ignore[attr-defined]
    tables = scenario.sparse.tables
    assert "user" not in tables  # too few events of a user for a row of its own
    assert tables["facts"].features == ["brand", "price"]  # but not a text that each item has of its own
    for omitted in (
        "text (most items have a value of their own)",
        "sizes (a click model reads numbers, text and the list `categories`)",
        "clicked (a feature or a column of the interactions has the name)",
    ):
        assert f"note: no features of the items: {omitted}\n" in out
        assert f"    # not used: {omitted}\n" in Path("mine.yaml").read_text()
    assert "year" in tables
    assert scenario.data.split.get_options() == {"test": 1, "valid": 1, "rl": 0, "cold_items": None}


def test_long_histories_hold_out_more_events_and_users_have_rows(new):
    pq.write_table(log(users=20, each=60, stars=np.arange(1200) % 5 + 1), "events.parquet")
    assert new("mine.yaml", "--data", "events.parquet", "--target", "rating >= 4")[0] == 0
    scenario = runs()
    assert "user" in scenario.sparse.tables
    assert scenario.data.split.get_options() | {"rl": 0} == {
        "test": 9,
        "valid": 4,
        "rl": 0,
        "cold_items": None,
    }


def test_a_target_that_reads_no_column_of_the_data_leaves_nothing_behind(refused):
    pq.write_table(log(clicked=np.zeros(640)), "events.parquet")
    assert "Did you mean 'clicked'" in refused(
        "mine.yaml", "--data", "events.parquet", "--target", "click == 1"
    )
    assert "--target need --data" in refused("ctr", "mine.yaml", "--target", "clicked == 1")
