"""`nonet new` checks the scenario that it writes as `nonet plan` and `nonet run` do, and leaves nothing behind where it fails."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from nonet.controller.setup import preflight
from nonet.deploy.new import from_data
from nonet.errors import ConfigError, DataError

from .test_new_from_data import as_csv, log


@pytest.mark.parametrize(
    ("check", "error"),
    [("_check_definition", ConfigError("a key is wrong")), ("check_data", DataError("a row is wrong"))],
)
def test_what_a_plan_refuses_is_refused_in_one_line(refused, monkeypatch, check, error):
    as_csv(log(), "log.csv")
    seen = []

    def refuse(scenario, *_):
        seen.append(scenario.name)
        raise error

    monkeypatch.setattr(preflight, check, refuse)
    assert str(error) in refused("mine.yaml", "--data", "log.csv")
    assert seen == ["mine"]


def test_warnings_of_a_plan_are_shown(new, monkeypatch):
    pq.write_table(log(), "events.parquet")
    monkeypatch.setattr(
        preflight, "check_data", lambda _, __, ___, checks, *____: checks.warnings.append("the moon is full")
    )
    assert "warning: the moon is full" in new("mine.yaml", "--data", "events.parquet")[1]


def test_a_scenario_that_cannot_be_written_leaves_no_reward_behind(refused, monkeypatch):
    pq.write_table(log(), "events.parquet")
    write = from_data.write_whole

    def fail(path, content):
        if path.suffix == ".yaml":
            raise ConfigError("the disk is full")
        write(path, content)

    monkeypatch.setattr(from_data, "write_whole", fail)
    refused("mine.yaml", "--data", "events.parquet")
