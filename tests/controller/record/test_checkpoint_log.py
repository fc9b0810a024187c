"""What a resume goes on from, and what it forgets."""

from __future__ import annotations

import pytest
from participant import written

from nonet.controller.record.checkpoint_log import CheckpointLog
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.validations import ValidationRecord
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.roles.settings import Schedule, StageSetup

PRETRAIN = StageSetup("pretrain", first=0, steps=6, users=4, lr=Schedule(peak=1e-3), base=1e-3)
RL = StageSetup(
    "rl",
    first=6,
    steps=4,
    users=4,
    lr=Schedule(peak=1e-4),
    base=1e-3,
    weights={"hit": 1.0},
    rolls_out=True,
    phases=("update", "publish"),
)
STAGES = ["pretrain", "rl"]


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def history(run, scenario="s", keep_last=9):
    return CheckpointLog(run, scenario, keep_last)


def commit(past, stage, done, version=1, kept=None):
    aside = past.begin_checkpoint(stage, done, version, {"sids": "a"}, {"trainer": 1})
    (aside / "dense").mkdir()
    (aside / "dense" / "model").write_bytes(b"weights")
    return past.complete_checkpoint(written(aside), kept)


def told(run):
    return [record.get("applied", record.get("committed")) for record in read_journal(run.journal)]


def test_a_commit_says_where_in_the_run_it_is(run):
    past = history(run)
    for step in range(3):
        past.record_applied_step(PRETRAIN, step)
    assert past.open_step == (PRETRAIN, 2)
    commit(past, PRETRAIN, 3)
    assert past.open_step is None
    found = past.find_resume_checkpoint()[1]
    assert (found.step, found.stage, found.stage_step, found.last, found.journal) == (
        3,
        "pretrain",
        3,
        False,
        3,
    )
    commit(past, PRETRAIN, 6)
    assert past.find_resume_checkpoint()[1].last
    commit(past, RL, 2, version=7)
    found = past.find_resume_checkpoint()[1]
    assert (found.step, found.stage_step, found.last, found.version) == (8, 2, False, 7)
    assert told(run) == [0, 1, 2, 3, 6, 8]


def test_a_resume_drops_commits_results_and_records_that_came_later(run):
    past = history(run)
    for step in range(6):
        past.record_applied_step(PRETRAIN, step)
    commit(past, PRETRAIN, 3)
    commit(past, PRETRAIN, 6)
    commit(past, RL, 2)
    past.close()
    run.results.mkdir()
    for name in ("pretrain.json", "pretrain.npz", "rl.json", "rl.rewards.after.npz", "popularity.json"):
        (run.results / name).write_text("{}")
    again = history(run)
    (run.checkpoints / "step-000008" / "manifest.json").unlink()  # torn: the newest whole one ends the stage
    _, manifest = again.find_resume_checkpoint()
    assert manifest.step == 6
    again.truncate_to(manifest, STAGES)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000003", "step-000006"]
    assert sorted(path.name for path in run.results.iterdir()) == [
        "popularity.json",
        "pretrain.json",
        "pretrain.npz",
    ]
    assert told(run) == [0, 1, 2, 3, 4, 5, 3]  # the commit's own record is written after it
    again.record_applied_step(RL, 0)
    assert told(run)[-1] == 6
    again.close()


def test_results_of_a_stage_that_is_under_way_again_are_forgotten(run):
    past = history(run)
    commit(past, PRETRAIN, 3)
    run.results.mkdir()
    (run.results / "pretrain.json").write_text("{}")
    past.truncate_to(past.find_resume_checkpoint()[1], STAGES)
    assert not list(run.results.iterdir())


def test_a_resume_inside_a_stage_keeps_what_was_re_ranked_before_its_first_step(run):
    past = history(run)
    commit(past, PRETRAIN, 6)
    commit(past, RL, 2)
    run.results.mkdir()
    names = ["rl_rerank.json", "rl_rerank.npz", "rl.rewards.rerank.npz"]
    for name in (*names, "rl_control.json", "rl_control_passes.npz", "rl_unselected.json", "rl.json"):
        (run.results / name).write_text("{}")
    past.truncate_to(past.find_resume_checkpoint()[1], STAGES)
    assert sorted(path.name for path in run.results.iterdir()) == sorted(names)


def test_only_a_commit_of_this_scenario_is_gone_on_from(run):
    with pytest.raises(ConfigError, match="no complete checkpoint to resume from"):
        history(run).find_resume_checkpoint()
    commit(history(run, "another"), PRETRAIN, 3)
    with pytest.raises(CheckpointError, match="another scenario"):
        history(run).find_resume_checkpoint()


def test_commits_beyond_those_kept_are_pruned_and_stage_ends_are_not(run):
    past = history(run, keep_last=1)
    commit(past, PRETRAIN, 3)
    commit(past, PRETRAIN, 6)
    commit(past, RL, 1)
    commit(past, RL, 2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000006", "step-000008"]


def test_a_step_that_is_committed_again_is_replaced(run):
    past = history(run)
    commit(past, PRETRAIN, 3, version=1)
    commit(past, PRETRAIN, 3, version=2)
    assert past.find_resume_checkpoint()[1].version == 2
    assert history(run).find_resume_checkpoint()[1].version == 2
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000003"]


def test_a_commit_that_is_chosen_later_ends_its_stage_and_later_ones_go(run):
    past = history(run)
    for done in (2, 4, 6):
        aside = past.begin_checkpoint(PRETRAIN, done, 1, {"sids": "a"}, {"trainer": 1}, last=False)
        (aside / "model").write_bytes(b"weights")
        past.complete_checkpoint(written(aside))
    assert not past.find_resume_checkpoint()[1].last
    path, manifest = past.end_stage(PRETRAIN, 4)
    assert (manifest.step, manifest.last) == (4, True)
    assert past.find_stage_end("pretrain") == history(run).find_stage_end("pretrain") == path
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-000002", "step-000004"]
    assert history(run).find_resume_checkpoint()[1] == manifest, "its files are whole as before"


def test_a_commit_that_waited_for_its_validation_until_the_stage_ended_is_not_kept(run):
    past = history(run, keep_last=2)
    for done in (1, 2, 3, 4, 5):
        aside = past.begin_checkpoint(PRETRAIN, done, 1, {"sids": "a"}, {"trainer": 1}, last=False)
        (aside / "model").write_bytes(b"weights")
        past.complete_checkpoint(written(aside), frozenset({1, 3}))
    names = [f"step-00000{step}" for step in (1, 3, 4, 5)]
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == names
    past.end_stage(PRETRAIN, 3)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-000003"]


def test_commits_that_are_spared_outlive_the_newest_ones(run):
    past = history(run, keep_last=1)
    for done in (1, 2, 3, 4):
        commit(past, PRETRAIN, done, kept=frozenset({2}) if done == 1 else None)
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-000002", "step-000004"]
    commit(past, PRETRAIN, 5, kept=frozenset())
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["step-000005"]


def test_a_resume_forgets_validations_that_came_after_its_commit(run):
    past = history(run)
    commit(past, PRETRAIN, 3)
    for stage, steps in (("pretrain", (2, 3, 4)), ("rl", (1,))):
        kept = ValidationRecord(run, stage)
        for step in steps:
            kept.add(step, {"metrics": {}, "nats": None, "events": 1})
        kept.close(best=2)
    past.truncate_to(past.find_resume_checkpoint()[1], STAGES)
    assert [entry["step"] for entry in ValidationRecord(run, "pretrain").history] == [2, 3]
    assert ValidationRecord(run, "pretrain").end is None
    assert ValidationRecord(run, "rl").history == []


def test_validations_of_a_stage_that_is_over_stay(run):
    past = history(run)
    commit(past, PRETRAIN, 6)
    kept = ValidationRecord(run, "pretrain")
    kept.add(6, {"metrics": {}, "nats": None, "events": 1})
    kept.close(best=6)
    past.truncate_to(past.find_resume_checkpoint()[1], STAGES)
    assert ValidationRecord(run, "pretrain").end == {"best": 6}


def test_a_cut_deletes_the_ranks_of_later_validations_and_keeps_those_of_earlier_ones(run):
    past = history(run)
    for done in (2, 4, 6):
        commit(past, PRETRAIN, done)
    run.results.mkdir()
    kept = (
        "pretrain.valid.step-00000002.npz",
        "pretrain.valid.step-00000004.npz",
        "other.valid.step-00000006.npz",
    )
    for name in (*kept, "pretrain.valid.step-00000006.npz", "rl.valid.step-00000007.npz"):
        (run.results / name).write_bytes(b"ranks")
    manifest = past.checkpoints.find_at_step(4)[1]
    past.truncate_to(manifest, STAGES)
    assert sorted(path.name for path in run.results.iterdir()) == sorted(kept)
