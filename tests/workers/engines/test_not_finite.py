"""Steps whose loss or gradient is not finite: skipped on every rank, counted, and ten in a row end the stage."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ring_world import Ring
from stand_ins import LoopSession, Recorder

from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.stages._loops import run_stage
from nonet.errors import DataError
from nonet.workers.engines import OptimizerOptions, list_gradients, make_engine, poison, skip_step
from nonet.workers.roles.learners.supervised_loss import SupervisedLoss
from nonet.workers.roles.settings import Schedule, StageSetup
from nonet.workers.runtime import Membership


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def break_steps(monkeypatch, *steps, where="loss"):
    """Let some steps have a loss, a dense gradient or a gradient of rows that is no number."""
    right, now = SupervisedLoss.compute_gradients, SimpleNamespace(step=-1)

    def gradients(update, read, rows, draw):
        now.step += 1
        grads, sums = right(update, read, rows, draw)
        if now.step in steps:
            if where == "loss":
                sums = sums | {"loss": math.nan}
            elif where == "dense":
                next(iter(update.context.dense.model.parameters())).grad.view(-1)[3] = math.inf
            else:
                next(iter(grads.values())).view(-1)[0] = math.nan
        return grads, sums

    monkeypatch.setattr(SupervisedLoss, "compute_gradients", gradients)


def state(world):
    """Weights, rows by table and key, and the optimizer's moments."""
    moments = world.trainer.dense.optimizer.state_dict()["state"]
    moments = {(at, name): value.clone() for at, slots in moments.items() for name, value in slots.items()}
    rows = {
        (table, key): row.tolist()
        for table in world.shard.sparse.tables
        for key, row in zip(*world.rows(table), strict=True)
    }
    return world.weights().clone(), rows, moments


@pytest.mark.parametrize("where", ["loss", "dense", "rows"])
def test_a_step_that_is_not_finite_moves_nothing_and_the_next_one_goes_on(ring, monkeypatch, where):
    world = ring.world()
    break_steps(monkeypatch, 3, 4, where=where)
    records = world.train("pretrain", 0, 3)
    before = state(world)
    records += world.train("pretrain", 3, 5)
    after = state(world)
    assert torch.equal(before[0], after[0])
    assert before[1] == {place: after[1][place] for place in before[1]}, "rows that were only read may be new"
    assert all(torch.equal(value, after[2][name]) for name, value in before[2].items())
    records += world.train("pretrain", 5, 6)
    assert [record.get("skipped", 0.0) for record in records] == [0, 0, 0, 1, 1, 0]
    assert [record.get("skipped_in_a_row", 0.0) for record in records] == [0, 0, 0, 1, 2, 0]
    assert torch.isfinite(world.weights()).all()
    assert not torch.equal(world.weights(), after[0])


def test_a_run_without_such_a_step_has_the_records_that_it_had(ring):
    (record,) = ring.world().train("pretrain", 0, 1)
    assert not {"skipped", "skipped_in_a_row"} & set(record)


def test_a_rank_s_bad_rows_make_the_norm_of_all_ranks_no_number():
    """Sums over ranks are NaN where one of them is, so all ranks decide alike without another call."""
    mine, other = [torch.zeros(0), torch.ones(3, 2)], torch.ones(3, 2)
    poison(mine)
    assert torch.isnan((mine[1] + other).norm())
    assert int(torch.isnan(mine[1]).sum()) == 1


def test_an_rl_step_that_is_not_finite_moves_nothing(ring):
    world = ring.world("stages.rl.sparse_lr=0.01")
    world.train("pretrain", 0, 2)
    world.trainer.begin(world.stages["rl"])
    beams = world.beams()
    scores = {
        name: np.ones(beams["valid"].shape, np.float32) * np.arange(beams["valid"].shape[1])
        for name in world.stages["rl"].weights
    }
    next(iter(world.trainer.model.parameters())).grad.view(-1)[0] = math.nan
    before = world.weights().clone()
    record = world.update(beams, scores)
    assert record["skipped"] >= 1
    assert record["norm"] == 0.0
    assert record["skipped_in_a_row"] == 1
    assert torch.equal(before, world.weights())
    beams = world.beams(step=1)
    assert "skipped" not in world.update(beams, scores, step=1)


def test_an_engine_of_somebody_else_needs_no_method_for_it():
    model = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(model=model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert len(list_gradients(engine)) == 2
    skip_step(engine)
    assert not any(parameter.grad.any() for parameter in model.parameters())
    assert make_engine({}, model, Membership(0, 1), OptimizerOptions(use="adamw")).collect_gradients()[
        0
    ].shape == (
        2,
        2,
    )


# --- the controller -----------------------------------------------------------------------------------------------------

SCENARIO = make_scenario(
    {
        "name": "broken",
        "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "rl": 2}},
        "sparse": {"tables": {"item": {"dim": 8}}},
        "stages": {
            "pretrain": {"epochs": 1},
            "rl": {"steps": 40, "users": 2, "rewards": {"hit": {"weight": 1.0}}},
        },
        "checkpoint": {"every": 4},
    }
)
PRETRAIN = StageSetup("pretrain", first=0, steps=40, users=8, lr=Schedule(peak=1e-3), base=1e-3)
RL = StageSetup(
    "rl",
    first=40,
    steps=40,
    users=2,
    lr=Schedule(peak=1e-3),
    base=1e-3,
    weights={"hit": 1.0},
    rolls_out=True,
    phases=("update", "publish"),
)


class Broken(LoopSession):
    """A session whose steps are skipped from the ninth on."""

    checkpoint: int | None = 8

    def end_at_last_checkpoint(self):
        self.done.append("ended early")
        return self.checkpoint

    def _update(self, stage, step, beams, scores):
        record = super()._update(stage, step, beams, scores) | {"norm": 0.0}
        row = max(0, beams[1] - 7)
        return record | ({"skipped": 1.0, "skipped_in_a_row": float(row)} if row else {})


def record(step):
    row = max(0, step - 7)
    bad = {"skipped": 1.0, "skipped_in_a_row": float(row), "loss": math.nan} if row else {}
    return {"loss": 2.0, "events": 1.0, "lr": 0.1, "norm": 1.0} | bad


def never():
    return False


@pytest.mark.parametrize("name", ["pretrain", "rl"])
def test_ten_skipped_steps_in_a_row_end_the_stage_at_its_last_checkpoint(name, monkeypatch):
    monkeypatch.setattr("nonet.controller.stages._step_report.score_held_out", lambda *_: {})
    session, recorder = Broken(SCENARIO, {"pretrain": PRETRAIN, "rl": RL}, record, {"hit": 1.0}), Recorder()
    assert run_stage(session, name, recorder, never), "the run goes on with the next stage"
    assert session.done[-1] == "ended early"
    notes = [body["text"] for kind, body in recorder.events if kind == "note"]
    row = 10 if name == "rl" else 12  # supervised steps are some a call
    assert f"{name}: the loss or gradient was not finite in {row} steps in a row" in notes[-1]
    assert "ends at its last complete checkpoint, step 8" in notes[-1]
    assert any("steps were skipped" in note for note in notes[:-1])
    assert all(math.isfinite(values.get("loss", 0.0)) for _, _, values in recorder.steps)


def test_a_stage_that_is_broken_before_its_first_checkpoint_is_one_line():
    session = Broken(SCENARIO, {"pretrain": PRETRAIN}, record)
    session.checkpoint = None
    with pytest.raises(DataError, match=r"no checkpoint to end at.*lower stages\.pretrain\.lr") as error:
        run_stage(session, "pretrain", Recorder(), never)
    assert error.value.exit_code == 2


def test_a_session_ends_a_stage_at_its_newest_checkpoint_and_loads_it(monkeypatch):
    from nonet.controller.groups import Published
    from nonet.controller.session import checkpoint_writer, running_session, stage_run

    calls = []
    manifest = SimpleNamespace(stage="pretrain", stage_step=8, step=8, last=True)
    session = object.__new__(stage_run.StageRun)
    session.validation, session.stages, session.published = None, {"pretrain": PRETRAIN}, Published(3, 3, 3)
    session.checkpoint_writer = checkpoint_writer.CheckpointWriter(session)
    session.checkpoint_log = SimpleNamespace(
        newest=(Path("step-000008"), manifest),
        has_ended=lambda stage: False,
        end_stage=lambda stage, done: calls.append(("end", done)) or (Path("step-000008"), manifest),
    )
    session.groups = SimpleNamespace(
        load=lambda path, stage: calls.append(("load", str(path), stage)),
        trainer=SimpleNamespace(ensure_on_device=lambda stage: None),
    )
    monkeypatch.setattr(running_session, "renumber_stages", lambda stages, manifest: stages)
    monkeypatch.setattr(running_session.RunningSession, "stage", property(lambda self: PRETRAIN))
    assert session.end_at_last_checkpoint() == 8
    assert calls == [("end", 8), ("load", "step-000008", None)]
    session.checkpoint_log.newest = (Path("x"), SimpleNamespace(stage="another", stage_step=8))
    assert session.end_at_last_checkpoint() is None
