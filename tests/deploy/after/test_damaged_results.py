"""The results of a run that somebody else sent: what is no file, or is damaged, is one line that names it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from nonet.controller.record import RunFolder
from nonet.deploy.after import ranks
from nonet.errors import ConfigError
from nonet.models.ranking.results import RankResults


@pytest.fixture
def tested(tmp_path):
    """A run of one stage, which has no results yet."""
    (tmp_path / "results").mkdir()
    results = object.__new__(RankResults)
    return ranks.TestedRun(RunFolder(tmp_path), (), (), ("rl",), 0, frozenset(), results, [], {})


@pytest.mark.timeout(60)
def test_results_that_are_a_pipe_count_as_none(tested):
    os.mkfifo(tested.run.results / "rl.npz")
    with pytest.raises(ConfigError, match="of 'rl'"):
        tested.load_results("rl")
    with pytest.raises(ConfigError, match="has not evaluated a stage yet"):
        tested.find_last_stage()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"[" * 100, None])
def test_damaged_results_are_one_line_that_names_the_file(tested, content):
    file = tested.run.results / "rl.npz"
    np.savez(file, other=np.zeros(3)) if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rl\.npz is damaged") as caught:
        tested.load_results("rl")
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content", [None, "[" * 200_000, "[1]", '{"artifacts": {"items": 3}}', '{"artifacts": 3}']
)
def test_the_results_of_the_tokenise_stage_that_are_damaged_are_named(tested, content):
    file = tested.run.results / "tokenise.json"
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenise\.json is (damaged|no regular file)"):
        ranks.TestedRun.from_run(tested.run)
