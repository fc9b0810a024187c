from __future__ import annotations

from pathlib import Path

import pytest
from views import node, scenario

from nonet.controller.cluster.view import ClusterView
from nonet.controller.plan.planner import plan
from nonet.controller.record import shared_folder
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.shared_folder import check_reached, check_shared, write_token
from nonet.errors import PlacementError
from nonet.workers.reach import explain_unreachable


class Workers:
    """A group on a node that sees `folder` where the controller sees the run's; `late`: after so many questions."""

    def __init__(self, folder: Path, name: str = "rollout-0", late: int = 0):
        self.folder, self.name, self.late, self.asked = folder, name, late, 0

    def check_shared_file(self, file: str, token: str) -> list[str]:
        self.asked += 1
        problem = explain_unreachable(self.folder / Path(file).name, token)
        return ["", f"{self.name} {problem}" if problem or self.asked <= self.late else ""]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "_PAUSES_S", (0.0, 0.0, 0.0))
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_nodes_that_share_the_folder_may_work(run):
    workers = Workers(run.path)
    check_shared(run, [workers, workers], ["a", "b"])
    assert workers.asked == 2
    assert not list(run.path.iterdir()), "the token is taken away"


@pytest.mark.parametrize(
    ("other", "said"), [("nowhere", "has no such folder"), ("empty", "sees another folder there")]
)
def test_a_node_that_does_not_reach_the_folder_is_named_with_what_to_do(run, tmp_path, other, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlacementError, match=rf"rollout-3 {said}.*--run-dir or NONET_RUNS"):
        check_shared(run, [Workers(run.path), Workers(tmp_path / other, "rollout-3")], ["a", "b"])
    assert not list(run.path.iterdir())


def test_a_folder_of_another_run_at_the_same_place_is_not_taken_for_it(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".reach").write_text("of another run")
    with pytest.raises(PlacementError, match="reads another file there"):
        check_shared(run, [Workers(tmp_path / "other")], ["a", "b"])


def test_a_mount_may_show_the_file_late(run):
    workers = Workers(run.path, late=2)
    check_shared(run, [workers], ["a", "b"])
    assert workers.asked == 3


def test_on_one_node_nothing_is_asked(run, tmp_path):
    workers = Workers(tmp_path / "nowhere")
    check_shared(run, [workers], ["a", "a"])
    assert workers.asked == 0


def test_a_plan_over_several_nodes_says_that_they_must_share_the_run_s_folder():
    parts = {"roles": {"trainer": {"pool": "gpu", "workers": 2}}}
    nodes = tuple(node(name, CPU=8.0, GPU=1.0) for name in ("a", "b"))
    said = "the run's folder (--run-dir, NONET_RUNS) must be one that all 2 nodes reach"
    assert said in plan(scenario(**parts), ClusterView(nodes)).format_text()
    one = ClusterView((node("a", CPU=8.0, GPU=2.0),))
    assert "must be one that all" not in plan(scenario(**parts), one).format_text()


def test_a_controller_that_sees_another_folder_than_its_driver_says_so(run, tmp_path):
    token = write_token(run)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(
        PlacementError, match=r"the controller, on n7, sees another folder there.*--run-dir or NONET_RUNS"
    ):
        check_reached(RunFolder(tmp_path / "elsewhere"), token, "the controller, on n7,")
    check_reached(run, token, "the controller, on n7,")
    assert not list(run.path.iterdir()), "the token is taken away"
