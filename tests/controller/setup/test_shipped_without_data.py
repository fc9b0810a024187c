"""Scenarios that are shipped without data say how they get some; beside tables they find them."""

import shutil

import pytest

from nonet.controller.scenario.scenario import LIBRARY, load_scenario
from nonet.controller.setup.run_files import data_setup
from nonet.errors import ConfigError

NAMES = ("amazon-sid", "amazon-sid-rl")


@pytest.mark.parametrize("name", NAMES)
def test_where_it_is_shipped_it_says_how_to_give_it_data(name):
    with pytest.raises(ConfigError, match=rf"`nonet new {name} DIR` puts it beside the tables") as error:
        data_setup(*load_scenario(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_beside_tables_and_with_whole_paths_it_reads_them(name, tmp_path):
    shutil.copy(LIBRARY / f"{name}.yaml", tmp_path)
    beside = data_setup(*load_scenario(tmp_path / f"{name}.yaml"))
    assert beside.interactions == str(tmp_path / "interactions.parquet")
    changes = [f"data.{key}={tmp_path}/{key}.parquet" for key in ("interactions", "items")]
    assert data_setup(*load_scenario(name, changes)).items == str(tmp_path / "items.parquet")


@pytest.mark.parametrize("name", NAMES)
def test_its_protocol_is_that_of_published_tables(name):
    scenario, _ = load_scenario(name)
    assert scenario.data.split.options() == {"test": 1, "valid": 1, "rl": int(name.endswith("rl"))}
    assert (scenario.data.history, scenario.data.repeats) == (50, "mask")
    assert scenario.evaluate.metrics == [f"{m}@{k}" for m in ("recall", "ndcg") for k in (5, 10, 20)]
    assert [each.title for each in scenario.evaluate.baselines or ()] == [
        "popularity",
        "transition_counter",
        "sasrec",
    ]
