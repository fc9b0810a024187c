"""`nonet recommend` on a run that has tokenised its data and committed nothing: the baselines answer, without Ray."""

import json
import shutil

import pytest

from nonet.bench.runs.feed import FeedWorld
from nonet.deploy.after.recommend import recommend_for


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make a run folder per policy; "old" is from before policies, so neither its sequences nor its facts name one."""
    found = {}
    for name, changes in (("allow", []), ("mask", ["data.repeats=mask"])):
        feed = FeedWorld(tmp_path_factory.mktemp(name), changes)
        shutil.copy(feed.folder / "feed.yaml", feed.folder / "scenario.yaml")
        (feed.folder / "results" / "tokenise.json").write_text(json.dumps(feed.facts))
        found[name] = feed.folder
    old = json.loads((found["mask"] / "results" / "tokenise.json").read_text())
    del old["data"]["repeats"]
    found["old"] = shutil.copytree(found["mask"], tmp_path_factory.mktemp("before") / "old")
    (found["old"] / "results" / "tokenise.json").write_text(json.dumps(old))
    return found


@pytest.mark.parametrize("policy", ["allow", "mask", "old"])
def test_seen_items_are_recommended_where_the_runs_data_allow_them(runs, policy):
    for asked in ({"user": "100", "like": []}, {"user": None, "like": ["1003", "1006", "1009"]}):
        answer = recommend_for(str(runs[policy]), asked["like"], asked["user"], 10)
        assert list(answer["columns"]) == ["popularity", "transition_counter"]
        again = [set(answer["history"]) & set(titles) for titles in answer["columns"].values()]
        assert any(again) == (policy == "allow")
