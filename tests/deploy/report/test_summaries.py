from __future__ import annotations

import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from likes_world import SCENARIO

from nonet.controller.record.run_folder import RunFolder
from nonet.deploy.after.recommend import recommend_for
from nonet.deploy.report.summaries import suggest_command
from nonet.errors import ConfigError
from nonet.storage.local_folders import FolderState, write_folder_state

RECOMMENDER = "name: shop\ndata: {interactions: log.parquet}\nstages: {pretrain: {epochs: 1}}\n"


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Make a finished run's folder over items of these titles, the most popular last."""
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))

    def make(titles: list[str], folder: str = "runs/shop-1", scenario: str = RECOMMENDER):
        run = RunFolder(tmp_path / folder)
        (run.path / "items").mkdir(parents=True)
        table = {"item_id": range(len(titles)), "title": titles, "events": range(len(titles))}
        pq.write_table(
            pa.table({name: list(values) for name, values in table.items()}), run.path / "items/items.parquet"
        )
        run.scenario.write_text(scenario)
        path = {"path": str(run.path / "items"), "sha256": ""}
        run.write_json("results/tokenise.json", {"artifacts": dict.fromkeys(("sequences", "sids"), path)})
        run.write_json("report.json", {"users": [{"user_id": "u 1"}, {"user_id": "u2"}]})
        return run

    return make


def test_two_popular_items_of_the_data_are_suggested(run_of):
    assert suggest_command(run_of(["Rare", "Red shoes", "Blue hat"])) == (
        "nonet recommend shop-1 --like 'Blue hat' 'Red shoes'"
    )


@pytest.mark.parametrize(
    "title", ["it's", 'say "hi"', "$(rm -rf /)", "a; b `c`", "* ? ~", "back\\slash", "naïve ♥"]
)
def test_a_shell_gives_the_titles_back_whatever_they_hold(run_of, title):
    words = shlex.split(suggest_command(run_of(["Rare", title, "Blue hat"])))
    assert words == ["nonet", "recommend", "shop-1", "--like", "Blue hat", title]


def test_titles_that_cannot_be_typed_are_passed_over(run_of):
    titles = ["Rare", "Fine", "--top", "two\nlines", "Twice", "Twice", "  ", "long " * 30, "Best"]
    assert shlex.split(suggest_command(run_of(titles)))[4:] == ["Best", "Fine"]


def test_without_titles_a_user_is_suggested(run_of):
    assert suggest_command(run_of(["0", "1", "2"])) == "nonet recommend shop-1 '--user=u 1'"


def test_a_run_elsewhere_is_named_by_its_folder(run_of, tmp_path):
    assert suggest_command(run_of(["A", "B"], folder="mine")) == f"nonet recommend {tmp_path}/mine --like B A"


def test_a_stored_run_is_named_by_its_address(run_of):
    run = run_of(["A", "B"])
    write_folder_state(run.path, FolderState("s3://runs/shop-1"))
    assert suggest_command(run) == "nonet recommend s3://runs/shop-1 --like B A"


def test_a_run_that_predicts_clicks_suggests_nothing_and_says_why(run_of):
    run = run_of(["A", "B"], scenario=SCENARIO)
    assert suggest_command(run) == ""
    with pytest.raises(ConfigError, match="predicts clicks"):
        recommend_for(str(run.path), ["A"], None, 3)
