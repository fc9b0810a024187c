from __future__ import annotations

import pytest

from nonet.controller.run_folder import find_run, list_runs, new_run
from nonet.errors import ConfigError


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(tmp_path))
    for name in ("aa-1", "ab-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scenario.yaml").write_text("name: x")


def test_a_run_is_found_by_prefix_last_and_folder(two_runs, tmp_path):
    assert find_run("aa").id == "aa-1"
    assert find_run("last").id == list_runs()[-1].id
    assert find_run(tmp_path / "ab-2").id == "ab-2"


def test_unknown_and_ambiguous_runs_list_what_there_is(two_runs):
    with pytest.raises(ConfigError, match=r"there is no run 'zz' .* the newest: aa-1, ab-2"):
        find_run("zz")
    with pytest.raises(ConfigError, match="2 runs start with 'a'"):
        find_run("a")


def test_ids_carry_name_time_and_chance(two_runs):
    import re

    assert re.fullmatch(r"quickstart-\d{8}-\d{6}-[0-9a-f]{4}", new_run("quickstart").id)
