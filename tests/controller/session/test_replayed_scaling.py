"""The commands that change numbers of workers, as a resumed run finds them in its journal; the plans that it writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

from nonet.controller.cluster import ClusterView, Node
from nonet.controller.plan import plan
from nonet.controller.record import SCALE, CommandQueue
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.session import scaling
from nonet.controller.session.bound_run import write_plan
from nonet.controller.session.scaling import WorkerScaling, restore_workers
from nonet.errors import PlacementError

SCENARIO = load_scenario("quickstart", ["roles={trainer: {workers: 2}}"])[0]


def make_scaling(folder: RunFolder, manifest: SimpleNamespace | None) -> WorkerScaling:
    return WorkerScaling(SimpleNamespace(run=folder, scenario=SCENARIO, restored=manifest), list)


def make_manifest(stage: str, step: int, *, last: bool = False) -> SimpleNamespace:
    return SimpleNamespace(stage=stage, stage_step=step, last=last)


def record_commands(folder: RunFolder, *commands: tuple[str, int, int]) -> None:
    """Record that trainers were scaled at (stage, step, number of workers)."""
    queue = CommandQueue(folder)
    for index, (stage, step, workers) in enumerate(commands):
        command = {"id": str(index), "verb": SCALE, "name": "", "workers": {"trainer": workers}}
        (folder.path / "commands").mkdir(exist_ok=True)
        queue.take(command, stage, step, "")


def test_a_resumed_run_has_the_workers_of_its_checkpoint_and_changes_them_again_later(tmp_path):
    folder = RunFolder(tmp_path)
    record_commands(folder, ("pretrain", 10, 1), ("finetune", 4, 3), ("rl", 5, 4))
    for manifest, workers, stage, next_step in (
        (None, 2, "pretrain", 10),
        (make_manifest("pretrain", 8), 2, "pretrain", 10),
        (make_manifest("pretrain", 10), 1, "finetune", 4),
        # The stage ended with an earlier checkpoint than its last one, so its commands are over.
        (make_manifest("pretrain", 6, last=True), 1, "finetune", 4),
        (make_manifest("finetune", 20), 3, "rl", 5),
        (make_manifest("rl", 9), 4, "rl", None),
    ):
        scaling = make_scaling(folder, manifest)
        assert restore_workers(folder, SCENARIO, manifest).roles["trainer"].workers == workers
        assert scaling.find_next_step(stage, 0) == next_step


def test_a_refused_command_and_one_about_rewards_are_not_applied_again(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "commands").mkdir()
    queue = CommandQueue(folder)
    queue.refuse({"id": "1", "verb": SCALE, "name": "", "workers": {"trainer": 9}}, "no room")
    queue.take({"id": "2", "verb": "detach", "name": "hit"}, "rl", 1, "detached")
    manifest = make_manifest("rl", 3)
    scaling = make_scaling(folder, manifest)
    assert restore_workers(folder, SCENARIO, manifest) == SCENARIO
    assert scaling.find_next_step("rl", 0) is None


def test_a_plan_with_other_numbers_of_threads_than_the_one_before_adds_a_note(tmp_path):
    scenario = load_scenario("quickstart")[0]
    run, notes = RunFolder(tmp_path), list[str]()
    for cores in (4.0, 4.0, 2.0):
        resources = {"CPU": cores, "memory": 16e9}
        write_plan(run, plan(scenario, ClusterView((Node("a", resources, resources),))), notes.append)
    (note,) = notes
    assert note.startswith("the number of threads changes with the cores and workers (trainer 2 to 1")
    assert json.loads((tmp_path / "plan.json").read_text())["groups"][0]["threads"] == 1


def test_a_drained_node_without_room_leads_to_one_checkpoint_and_leaves_the_loop_as_it_was(
    tmp_path, monkeypatch
):
    saved, notes = list[int](), list[str]()
    group = SimpleNamespace(name="trainer", nodes=("node-1234",), workers=1)
    session = SimpleNamespace(
        run=RunFolder(tmp_path),
        scenario=SCENARIO,
        restored=None,
        stage=SimpleNamespace(name="rl", steps=8),
        applied_steps=4,
        groups=SimpleNamespace(binding=SimpleNamespace(groups=[group])),
        add_note=notes.append,
    )

    def find_no_room(*_: object, **__: object) -> None:
        raise PlacementError("no room for group trainer")

    monkeypatch.setattr(scaling, "_LOOK_EVERY_S", -1.0)
    monkeypatch.setattr(scaling, "list_draining_nodes", lambda: {"node-1234"})
    monkeypatch.setattr(scaling, "read_live_view", lambda: None)
    monkeypatch.setattr(scaling, "plan", find_no_room)
    changes = WorkerScaling(session, lambda: saved.append(session.applied_steps))
    assert not changes.poll()
    assert not changes.poll()
    assert not changes.is_due
    assert saved == [4]
    assert notes == [
        "node node-123 is drained: wrote a checkpoint; its workers stay until it ends, as no room for group trainer"
    ]
