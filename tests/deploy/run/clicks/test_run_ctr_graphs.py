"""A click model that reads neighbours, from tables to report on real Ray actors: the bits of a run in one process."""

from __future__ import annotations

import io

import numpy as np
import pytest
from likes_world import change_scenario, make_click_run, make_likes

from nonet.controller.record.checkpoint import Checkpoints
from nonet.controller.record.run_folder import RunFolder
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

pytestmark = pytest.mark.slow

GRAPHS = {
    "near": {"edges": "item-item", "window": 3, "half_life": "5h", "k": 4},
    "fans": {"edges": "item-user", "k": 3},
}
TABLES = {
    "user": {"features": ["user", "fans"]},
    "item": {"features": ["item", "liked", "near"]},
    "counts": {"features": ["near_1hop", "near_2hop", "fans_2hop"]},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("graphs"))
    return change_scenario(folder, data={"graph": GRAPHS}, sparse={"tables": TABLES})


def run_on_ray(path, name, *changes, text=None):
    scenario = api.scenario(path, list(changes))
    return api.run(scenario, run_dir=path.parent / name, panel=Panel(text or io.StringIO(), live=False))


def read_results(folder: RunFolder, subject: str) -> np.ndarray:
    with np.load(folder.results / f"{subject}.npz") as arrays:
        return arrays["test"]


def list_hashes(folder: RunFolder) -> dict[int, dict[str, str]]:
    """Return the hashes of the files of each checkpoint by its step, without files that say when they were written."""
    return {
        manifest.step: dict(manifest.files)
        for _, manifest in (
            Checkpoints(folder.checkpoints).find_at_step(int(path.name.removeprefix("step-")))
            for path in sorted(folder.checkpoints.glob("step-*"))
        )
    }


def test_a_run_on_ray_reads_the_neighbours_of_a_run_in_one_process(ray_local, scenario):
    text = io.StringIO()
    on_ray = run_on_ray(scenario, "ray", text=text)
    assert "graphs: near 13,440 edges, fans 2,400 edges" in text.getvalue()
    assert set(on_ray.report["baselines"]) == {"popularity", "logistic_regression", "neighbours"}
    assert "neighbours" in (on_ray.folder.path / "report.html").read_text()
    here = make_click_run(scenario.parent, scenario=scenario, name="here", baselines=("neighbours",))
    assert np.array_equal(read_results(on_ray.folder, "neighbours"), read_results(here, "neighbours"))
    assert np.array_equal(read_results(on_ray.folder, "train"), read_results(here, "train"))
    newest = [sorted(run.checkpoints.glob("step-*"))[-1] for run in (on_ray.folder, here)]
    for file in ("clicks/events.npz", "clicks/model.json"):
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes()
    found, expected = (list_hashes(run) for run in (on_ray.folder, here))
    step = max(expected)
    dense = [name for name in expected[step] if name.startswith("dense/model")]
    assert dense
    assert all(found[step][name] == expected[step][name] for name in dense)


def test_two_trainers_read_the_same_neighbours(ray_local, scenario):
    whole = run_on_ray(scenario, "one")
    pair = run_on_ray(scenario, "pair", "roles={trainer: {workers: 2}}")
    assert np.array_equal(read_results(whole.folder, "neighbours"), read_results(pair.folder, "neighbours"))
    assert pair.report["rows"] == whole.report["rows"]
    # Dropout is drawn per rank, so the models differ by more than rounding.
    one, two = (each.report["stages"]["train"]["auc"] for each in (whole, pair))
    assert two == pytest.approx(one, abs=0.05)


def test_a_stopped_run_with_graphs_goes_on_to_the_same_bits(ray_local, scenario):
    from nonet import Session
    from nonet.controller.scenario.scenario import load_scenario

    whole = run_on_ray(scenario, "undisturbed")
    with Session(
        load_scenario(scenario)[0], folder=scenario.parent, run=RunFolder(scenario.parent / "stopped")
    ) as session:
        session.begin("train")
        session.trainer.train(session.stages["train"], 0, 20)
        for step in range(20):
            session.commit(step)
        run_folder = session.run
    resumed = api.resume(run_folder.path, panel=Panel(io.StringIO(), live=False))
    assert resumed.report["stages"] == whole.report["stages"]
    assert np.array_equal(read_results(run_folder, "train"), read_results(whole.folder, "train"))
