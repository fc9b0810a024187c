"""Scenarios that are shipped without data say how they get some; beside tables they find them."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario.document.library import LIBRARY
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import ConfigError

NAMES = ("amazon-sid", "amazon-sid-rl")


def _write_tables(folder):
    """Thirty users of eight events over forty items."""
    events = np.arange(240)
    table = {"user_id": events // 8, "item_id": events * 7 % 40, "timestamp": events}
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    pq.write_table(
        pa.table({"item_id": np.arange(40), "title": [f"item {i}" for i in range(40)]}),
        folder / "items.parquet",
    )


@pytest.mark.parametrize("name", NAMES)
def test_where_it_is_shipped_it_says_how_to_give_it_data(name):
    with pytest.raises(ConfigError, match=rf"`nonet new {name} DIR` puts it beside the tables") as error:
        make_data_setup(*load_scenario(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_beside_tables_and_with_whole_paths_it_reads_them(name, tmp_path):
    shutil.copy(LIBRARY / f"{name}.yaml", tmp_path)
    _write_tables(tmp_path)
    beside = make_data_setup(*load_scenario(tmp_path / f"{name}.yaml"))
    assert beside.options.interactions == str(tmp_path / "interactions.parquet")
    changes = [f"data.{key}={tmp_path}/{key}.parquet" for key in ("interactions", "items")]
    assert make_data_setup(*load_scenario(name, changes)).options.items == str(tmp_path / "items.parquet")


@pytest.mark.parametrize("name", NAMES)
def test_its_protocol_is_that_of_published_tables(name):
    scenario, _ = load_scenario(name)
    assert scenario.data.split.get_options() == {
        "test": 1,
        "valid": 1,
        "rl": int(name.endswith("rl")),
        "cold_items": None,
    }
    assert (scenario.data.history, scenario.data.repeats) == (50, "mask")
    assert scenario.evaluate.metrics == [f"{m}@{k}" for m in ("recall", "ndcg") for k in (5, 10, 20)]
    assert [each.title for each in scenario.evaluate.baselines or ()] == [
        "popularity",
        "transition_counter",
        "sasrec",
    ]
