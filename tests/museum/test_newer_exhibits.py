"""What commit b37ab36 left behind opens today: buckets, several files of labels, Keras, a scaled run, versions and posts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from exhibits import NEWER, NEWER_NAMES, open_exhibit
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.controller.record import Checkpoints, RunFolder, find_run, read_manifest
from nonet.deploy.after import compare_runs, evaluate_run, recommend_for
from nonet.deploy.opened import OpenedRun
from nonet.deploy.report import write_report
from nonet.deploy.run import api
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.storage import mounts, open_storage
from nonet.storage.objects import read_clock
from tests.museum.buckets import fill_bucket
from tests.s3 import BUCKET, serve_s3

FOLDERS = ("labels", "keras", "scaled", "served")
ADDRESS = f"{BUCKET}/runs"


@pytest.fixture(scope="module")
def museum(tmp_path_factory):
    """Each exhibit in a folder of its own, by name."""
    root = tmp_path_factory.mktemp("museum")
    return {name: open_exhibit(name, root / name, NEWER) for name in NEWER_NAMES}


@pytest.fixture
def bucket(museum, tmp_path, monkeypatch):
    """Return a function that fills the bucket with an exhibit and returns the address of its run."""
    with serve_s3() as variables:
        monkeypatch.setenv("NONET_CACHE", str(tmp_path / "cache"))

        def fill(name: str) -> str:
            fill_bucket(variables["AWS_ENDPOINT_URL"], museum[name] / f"bucket_{name}")
            (run,) = open_storage(ADDRESS).list_names()
            return f"{ADDRESS}/{run}"

        yield fill


def read_report(folder: Path):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_report_is_written_again_and_a_run_differs_not_from_itself(museum, name):
    folder = museum[name] / name
    assert read_report(folder)["name"] in write_report(folder).read_text()
    answer = compare_runs(str(folder), str(folder))
    assert all(metric["diff"] == 0 for metric in answer["metrics"].values())


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoints_have_the_metrics_that_they_had(museum, name):
    folder = museum[name] / name
    answer = evaluate_run(str(folder))
    for stage, metrics in read_report(folder)["stages"].items():
        common = {name: value for name, value in answer["subjects"][stage].items() if name in metrics}
        assert common
        assert common == pytest.approx({name: metrics[name] for name in common}, rel=1e-4)


def test_the_tasks_of_several_files_of_labels_are_evaluated(museum):
    subjects = evaluate_run(str(museum["labels"] / "labels"))["subjects"]
    assert {"auc", "log_loss", "auc@cart", "log_loss@paid"} <= set(subjects["train"])


def test_a_scaled_run_names_its_workers(museum, command):
    folder = museum["scaled"] / "scaled"
    (asked,) = read_report(folder)["commands"]
    assert asked["workers"] == {"trainer": 2, "hit": 2}
    path, _ = Checkpoints(folder / "checkpoints").find_newest()
    assert read_manifest(path).participants["trainer"] == 2
    code, out, _ = command("status", folder, "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")


def test_a_run_is_served_by_its_older_version_with_the_events_that_were_posted(museum):
    run = museum["served"] / "served"
    assert OpenedRun.open(run).registry.list_versions() == [1, 2]
    app = build_single_process_app(str(run), ServeConfig(deadline_s=20.0, follow=False), True)
    try:
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
            answer = ask(client, user="user_001", k=3, explain=True)
            assert answer["fallback"] is None
            assert answer["version"] == 1  # version 2 was rolled back
            assert len(items(answer)) == 3
            assert answer["history"][-1] == "thing d3"
            assert not ask(client, user="stranger", k=3)["cold_start"]
            posted = [{"item": "SKU-0003", "values": {"rating": 5.0}}]
            again = ask(client, "/events", user="user_001", events=posted, id="post 0")
            assert again["again"]
    finally:
        app.state.service.engines.close()


def test_a_stored_run_is_listed_reported_evaluated_and_asked(bucket, command):
    address = bucket("stored")
    code, out, _ = command("status", address, "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")
    assert address.rpartition("/")[2] in command("runs", ADDRESS)[1]
    code, out, _ = command("report", address)
    assert (code, address in out) == (0, True)
    before = read_report(find_run(address).path)
    answer = evaluate_run(address)
    for stage, metrics in before["stages"].items():
        assert answer["subjects"][stage]["recall@5"] == pytest.approx(metrics["recall@5"])
    assert len(recommend_for(address, [], "user_003", 5)["columns"]["rl"]) == 5


def test_a_stored_run_whose_machine_was_lost_is_interrupted_inside_rl(bucket, command, monkeypatch):
    address = bucket("stored_stopped")
    # The bucket was filled a moment ago; its clock goes on.
    monkeypatch.setattr(mounts, "read_clock", lambda storage: read_clock(storage) + 61)
    code, out, _ = command("status", address, "--json")
    row = json.loads(out)
    assert (code, row["state"], row["stage"]) == (0, "interrupted", "rl")
    assert not find_run(address).report.exists()


@pytest.mark.slow
def test_a_stored_run_whose_machine_was_lost_is_resumed_to_its_report_on_ray(no_ray, bucket, command):
    address = bucket("stored_stopped")
    done = api.resume(address)
    assert done.state == "done"
    assert find_run(address).report.exists()
    assert address in command("report", address)[1]


@pytest.mark.slow
def test_a_scaled_run_is_resumed_before_its_command_and_scales_again_on_ray(no_ray, museum):
    run = RunFolder(museum["scaled"] / "scaled")
    (asked,) = read_report(run.path)["commands"]
    Checkpoints(run.checkpoints).delete_after(9)
    run.report.unlink()
    ray.shutdown()  # that of the test before
    ray.init(address="local", num_cpus=6, namespace="nonet", include_dashboard=False, log_to_driver=False)
    try:
        assert api.resume(run.path).state == "done"
    finally:
        ray.shutdown()
    assert read_report(run.path)["commands"] == [asked]
    path, _ = Checkpoints(run.checkpoints).find_newest()
    assert read_manifest(path).participants["trainer"] == 2
