"""What follows a run publishes: each catalogue for all that is served, the newest checkpoint, and only versions of its run."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_run import TrainedRun

from nonet import trust
from nonet.controller.record import CATALOGUES
from nonet.deploy.after import add_items
from nonet.deploy.opened import OpenedRun
from nonet.deploy.serving.service.follower import RunFollower
from nonet.deploy.serving.versions import describe_versions, find_registry, promote_version, rollback_version
from nonet.errors import ConfigError, DeadlineExceeded
from nonet.workers.registry.version import _digest


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_approved", set())
    run = TrainedRun(tmp_path, memory=False)
    run.commit(2)
    return run


def put_items(served, folder, *ids):
    """Add new items, or put withdrawn ones back."""
    columns = {
        "item_id": ids,
        "title": [f"item {n}" for n in ids],
        "categories": [["kind1"]] * len(ids),
    }
    pq.write_table(pa.table(columns), folder / "new.parquet")
    add_items(str(served.folder.path), str(folder / "new.parquet"))


def list_served(run):
    """Return the ids of the items that each version with traffic may list, the default version first."""
    listed = []
    for number in run.registry.serving.versions:
        corpus = run.catalogues.get_corpus(run.registry.read_version(number).catalogue)
        listed.append(set(corpus.item_id[np.asarray(corpus.trie.leaf_of_item) >= 0].tolist()))
    return listed


def follow(served):
    """Return a run and its follower after a check."""
    run = served.open()
    follower = RunFollower(run)
    follower.check_once()
    assert follower.problem is None
    return run, follower


def test_an_item_that_was_withdrawn_and_put_back_is_listed_again(served, tmp_path):
    run, follower = follow(served)
    add_items(str(served.folder.path), None, ["1009"])
    follower.check_once()
    assert [1009 in items for items in list_served(run)] == [False]
    put_items(served, tmp_path, 1009)
    follower.check_once()
    assert [1009 in items for items in list_served(run)] == [True]
    assert "1009" not in run.withdrawn


def test_an_item_is_added_to_a_canary_too_and_stays_when_the_old_version_is_promoted(served, tmp_path):
    run, follower = follow(served)
    step = served.commit(1, last=False)
    canary = run.publish_checkpoint(step)
    run.registry.promote(canary.number, 0.3)
    put_items(served, tmp_path, 5000)
    follower.check_once()
    assert [5000 in items for items in list_served(run)] == [True, True]
    assert list(run.registry.serving.shares.values()) == [0.3]
    run.registry.promote(canary.number)  # the number that the operator knows
    follower.check_once()
    assert [5000 in items for items in list_served(run)] == [True]
    assert run.registry.read_version(run.registry.serving.default).dense == canary.dense
    rollback_version(str(served.folder.path), 1)
    follower.check_once()
    assert [5000 in items for items in list_served(run)] == [True]


def test_a_step_with_more_digits_is_newer(served):
    run, follower = follow(served)
    served._steps = 999_998
    for step in (999_999, 1_000_000):
        assert served.commit(1) == step
        follower.check_once()
        follower.check_once()  # The first check has changed what is served, so that this one looks again.
        assert run.registry.read_version(run.registry.serving.default).source["step"] == step


def test_a_follower_goes_on_after_a_process_was_in_its_way(served, monkeypatch):
    run, follower = follow(served)

    def wait(*arguments, **options):
        raise DeadlineExceeded("another process is publishing")

    served.commit(1)
    with monkeypatch.context() as context:
        context.setattr(OpenedRun, "publish_newest", wait)
        follower.check_once()
        assert follower.problem == "another process is publishing"
    follower.check_once()
    assert (follower.problem, run.registry.serving.default) == (None, 2)


def test_a_torn_manifest_of_an_older_version_does_not_stop_a_follower(served):
    run, follower = follow(served)
    served.commit(1)
    follower.check_once()
    manifest = run.registry.root / "versions" / "000001.json"
    manifest.write_bytes(manifest.read_bytes()[:60])
    served.commit(1)
    follower.check_once()
    assert (follower.problem, run.registry.serving.default) == (None, 3)
    assert [row["state"] for row in describe_versions(str(served.folder.path))] == ["torn", "-", "served"]


def test_the_catalogue_of_a_version_that_was_rolled_back_stops_no_later_checkpoint(served, tmp_path):
    run, follower = follow(served)
    put_items(served, tmp_path, 5000)
    follower.check_once()
    assert run.registry.serving.default == 2
    assert run.registry.rollback(1).default == 1, "the same weights with the catalogue before"
    served.commit(1)
    follower.check_once()
    assert (follower.problem, run.registry.read_version(run.registry.serving.default).base) == (None, 1)


def test_a_run_that_has_lost_its_newest_catalogue_does_not_serve_the_one_before(served, tmp_path):
    run, follower = follow(served)
    put_items(served, tmp_path, 5000)
    follower.check_once()
    (run.folder.path / CATALOGUES).rename(tmp_path / "away")
    run = served.open()  # in another process
    follower = RunFollower(run)
    follower.check_once()
    assert "does not have; put its catalogues.json back from a copy" in follower.problem
    assert (run.registry.serving.default, run.registry.list_versions()) == (2, [1, 2])
    (tmp_path / "away").rename(run.folder.path / CATALOGUES)
    follower.check_once()
    assert (follower.problem, run.registry.serving.default) == (None, 2)


def begin_metrics(run, time_s):
    run.folder.metrics.write_text(json.dumps({"t": time_s, "name": "loss"}) + "\n")


def test_two_runs_at_one_address_do_not_serve_each_other_s_weights(served, tmp_path):
    (tmp_path / "other").mkdir()
    other = TrainedRun(tmp_path / "other", memory=False)
    other.commit(3)
    begin_metrics(served, 1)
    begin_metrics(other, 2)
    address = f"file://{tmp_path}/bucket/movies"
    OpenedRun.open(served.folder.path, address=address).publish_newest()
    with pytest.raises(ConfigError, match=r"^registry: file:.* has the versions of another run \('run'\)"):
        OpenedRun.open(other.folder.path, address=address).publish_newest()
    assert OpenedRun.open(served.folder.path, address=address).registry.list_versions() == [1]


def test_a_run_beside_the_serving_folder_of_another_one_does_not_serve_its_weights(served):
    begin_metrics(served, 1)
    served.open().publish_newest()
    begin_metrics(served, 2)  # a new run of the same name
    for use in (lambda: served.open().has_version, lambda: promote_version(f"{served.folder.path}@1", None)):
        with pytest.raises(ConfigError, match=r"serving/registry has the versions of another run"):
            use()


def test_versions_of_a_foreign_run_go_nowhere_before_the_user_has_given_or_approved_the_address(
    served, tmp_path, monkeypatch
):
    run = str(served.folder.path)
    served.open().publish_newest()
    serving = served.folder.path / "serving"
    (serving / "registry.uri").write_text(f"file://{tmp_path}/theirs")
    for act in (
        lambda: promote_version(f"{run}@1", None),
        lambda: rollback_version(run, 1),
        lambda: find_registry(run),
    ):
        with pytest.raises(
            ConfigError, match=r"registry.uri names file:.*/theirs, which you have neither given nor"
        ):
            act()
    assert not (tmp_path / "theirs").exists()
    OpenedRun.open(run, address=f"file://{tmp_path}/mine").publish_newest()
    promote_version(f"{run}@1", None)
    assert (tmp_path / "mine" / "serving.json").exists(), "what the user has given once needs no question"
    assert not (tmp_path / "theirs").exists()


def test_a_foreign_manifest_pushes_and_exports_no_file_of_the_user(served, tmp_path):
    served.open().publish_newest()
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    manifest = served.folder.path / "serving/registry/versions/000001.json"
    body = json.loads(manifest.read_text())
    body["counts"]["x"] = str(secret)
    body.pop("sha256")
    manifest.write_text(json.dumps(body | {"sha256": _digest(body)}))
    run = OpenedRun.open(served.folder.path, address=f"file://{tmp_path}/bucket")
    run.registry.withdraw({"1"})
    assert not any("id_rsa" in path.name for path in (tmp_path / "bucket").rglob("*"))
    rows = describe_versions(str(served.folder.path))
    assert "counts.x: String should match pattern" in rows[0]["problem"]
