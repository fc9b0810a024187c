"""Rewards of every kind in a live session: those that fail, hang or die cost their own rows; people steer; resumes repeat it."""

from __future__ import annotations

import os
import signal
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from tests_ring import make_ring

import nonet
from nonet.controller.record.commands import CommandQueue
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.deploy.run import steer
from nonet.errors import ConfigError
from nonet.plugins import import_file
from nonet.workers.engines import MEASURED

EXAMPLES = Path(__file__).parents[3] / "examples" / "rewards"
ODD = """
import os, signal, time
import numpy as np
import nonet


@nonet.reward
async def later(item):
    return item * 0.5


@nonet.reward
def raises(item, user_id, step):
    if step == 1 and (user_id % 3 == 0).any():
        raise ValueError("three")
    return item * 0.1


@nonet.reward
def nan(item, user_id, step):
    return np.where((user_id % 4 == 0)[:, None] & (step == 2), np.nan, item * 0.1)


@nonet.reward
def hangs(item, user_id, step):
    if step == 3 and (user_id % 5 == 0).any():
        time.sleep(1000)
    return item * 0.1


@nonet.reward
def dies(item, *, once: str):
    if os.path.exists(once):
        os.unlink(once)
        os.kill(os.getpid(), signal.SIGKILL)
    return item * 0.1


@nonet.reward
def fresh(item):
    return item % 7


@nonet.reward
def broken(item):
    return item[:, 0]
"""
QUICK = ("stages.rl.steps=6", "checkpoint.every=3", "stages.rl.users=12")


def session_of(folder, run, rewards, *more, resume=False):
    changes = [*QUICK, f"stages.rl.rewards={rewards}", *more]
    if resume:
        return nonet.Session(run.path / "scenario.yaml", run=run, resume=True)
    return nonet.Session(folder / "ring.yaml", changes=changes, run=run)


def stepped(session, step, beams):
    """Scores of a step as arrays, and its record; the step is over then."""
    scores = session.reward.score(beams)
    values = {name: future.get(60.0) for name, future in scores.items()}
    record = session.trainer.update(session.stage, step, beams, scores)
    session.publish()
    return values, record


def unscored(values, users):
    return {name: set(users[np.isnan(score).any(1)].tolist()) for name, score in values.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rewards_that_fail_cost_their_own_rows_and_the_loop_goes_on(ray_local, tmp_path):
    folder = make_ring(tmp_path)
    (folder / "odd.py").write_text(ODD)
    served = import_file(EXAMPLES / "server.py", "server")
    server = ThreadingHTTPServer(("127.0.0.1", 0), served.Even)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    once = tmp_path / "once"
    rewards = (
        "{hit: {}, later: {use: 'odd.py:later'}, raises: {use: 'odd.py:raises', workers: 2}, nan: {use: 'odd.py:nan'}, "
        "hangs: {use: 'odd.py:hangs', timeout_s: 1}, "
        f"dies: {{use: 'odd.py:dies', once: '{once}'}}, "
        f"even: {{use: 'http://127.0.0.1:{server.server_port}/even', timeout_s: 5}}}}"
    )
    run, seen = RunFolder(tmp_path / "run"), []
    with session_of(folder, run, rewards) as session:
        for step, prompts in session.iterate_prompts("rl"):
            if step == 4:
                once.touch()
            if step == 5:
                server.shutdown()
                server.server_close()
            beams = session.rollout.generate(prompts)
            users, item = beams.get(60.0)["user_id"], beams.get(60.0)["item"]
            values, record = stepped(session, step, beams)
            seen.append((users, unscored(values, users), record, session.reward.quarantined))
            if step != 5:
                np.testing.assert_allclose(values["even"], (item % 2 == 0) & (item >= 0))
            session.commit(step)
    everything = [{name for name, lost in each[1].items() if lost} for each in seen]
    assert everything == [set(), {"raises"}, {"nan"}, {"hangs"}, set(), {"even"}]
    for step, (name, by) in {1: ("raises", 3), 2: ("nan", 4), 3: ("hangs", 5)}.items():
        users, lost, record, quarantined = seen[step]
        assert lost[name] == {int(user) for user in users if user % by == 0}, name
        assert lost[name], "the world has such users"
        assert set(quarantined[0].users) == {str(user) for user in lost[name]}
        assert record["unscored"] == sum(user in lost[name] for user in users)
        assert np.isfinite(record["loss"])
    assert "cannot be reached" in seen[5][3][0].why


@pytest.mark.timeout(300)
def test_rewards_are_attached_set_and_detached_between_steps_and_a_resume_repeats_it(ray_local, tmp_path):
    folder = make_ring(tmp_path)
    (folder / "odd.py").write_text(ODD)
    run, use = RunFolder(tmp_path / "run"), str(folder / "odd.py")
    rewards = "{hit: {}, low: {use: rewards/own.py, ceiling: 20, weight: 0.5, at_least: 0.9}}"
    records: dict[int, dict] = {}
    asked: dict[str, str] = {}

    def ask(name, command):
        asked[name] = command[1]

    with session_of(folder, run, rewards) as session:
        for step, prompts in session.iterate_prompts("rl"):
            records[step] = stepped(session, step, session.rollout.generate(prompts))[1]
            session.commit(step)
            if step == 0:
                ask("attach", steer.attach(run.path, f"{use}:fresh", weight=0.2))
                ask("broken", steer.attach(run.path, f"{use}:broken"))
                ask("nobody", steer.detach(run.path, "nobody"))
                ask("lr", steer.set_value(run.path, "stages.rl.lr", 1.0))
                ask("word", steer.set_value(run.path, "stages.rl.rewards.low.weight", "much"))
            if step == 3:
                ask("set", steer.set_value(run.path, "stages.rl.rewards.low.weight", 0.1))
                ask("detach", steer.detach(run.path, "fresh"))
            if step == 4:
                break
    answers = {name: steer.wait_for_answer(run, command, 0.0) for name, command in asked.items()}
    assert {name: answer["state"] for name, answer in answers.items()} == {
        "attach": "taken",
        "broken": "refused",
        "nobody": "refused",
        "lr": "refused",
        "word": "refused",
        "set": "taken",
        "detach": "taken",
    }
    assert "wanted numbers of shape" in answers["broken"]["text"]
    assert "rewards: hit, low, fresh" in answers["nobody"]["text"]
    assert answers["word"]["text"].startswith("stages.rl.rewards.low.weight: ")
    assert ["reward.fresh" in records[step] for step in range(5)] == [False, True, True, True, False]
    multipliers = [records[step]["multiplier.low"] for step in range(5)]
    assert multipliers[0] == 0 < multipliers[1] < multipliers[2]
    assert [each.get("step") for each in CommandQueue(run).list_taken()] == [1, None, None, None, None, 4, 4]
    with session_of(folder, run, rewards, resume=True) as session:
        for step, prompts in session.iterate_prompts("rl"):
            assert step >= 3, "the commit after three steps is the newest"
            again = stepped(session, step, session.rollout.generate(prompts))[1]
            session.commit(step)
            if step in records:
                same = {key: value for key, value in records[step].items() if key not in MEASURED}
                assert {key: value for key, value in again.items() if key not in MEASURED} == same
    assert len([each for each in read_journal(run.journal) if "applied" in each]) == 6


@pytest.mark.timeout(300)
def test_an_actor_that_runs_already_scores_and_a_scene_has_weights_of_its_own(ray_local, tmp_path):
    import ray

    @ray.remote(num_cpus=0)
    class Margin:
        def score(self, message):
            return np.asarray(message["item_id"]) % 5 * 1.0

    actor = Margin.options(name="margin", namespace="pricing").remote()
    folder = make_ring(tmp_path)
    rewards = "{hit: {}, margin: {use: 'actor://pricing/margin', weight: 0.5, timeout_s: 10}}"
    scenes = "stages.rl.scenes={column: rating, of: {'5': {rewards: [hit], catalogue: 'item_id < 1030'}}}"
    with session_of(
        folder, RunFolder(tmp_path / "run"), rewards, scenes, "stages.rl.mismatch={correct: none}"
    ) as session:
        for step, prompts in session.iterate_prompts("rl"):
            beams = session.rollout.generate(prompts)
            sent = beams.get(60.0)
            values, record = stepped(session, step, beams)
            session.commit(step)
            np.testing.assert_allclose(values["margin"], np.where(sent["valid"], sent["item_id"] % 5, 0))
            fives = sent["scene"] == 0
            assert (sent["item_id"][fives][sent["valid"][fives]] < 1030).all()
            assert record["mismatch/kl"] < 1e-9
            if fives.any():
                assert record["scene.5.reward"] == pytest.approx(record["scene.5.reward.hit"])
            if step == 1:
                break
    del actor


def test_a_run_that_nobody_runs_takes_no_command(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.scenario.write_text((make_ring(tmp_path) / "ring.yaml").read_text())
    with pytest.raises(ConfigError, match="is not in progress; continue it with: nonet resume"):
        steer.detach(run.path, "hit")
    run.report.write_text("{}")
    with pytest.raises(ConfigError, match="has finished"):
        steer.detach(run.path, "hit")


def _stop(session, name, how):
    """Send the first process of a reward a signal."""
    pid = session.groups.hosts[f"rl.reward.{name}"].wait_until_ready()[0]["pid"]
    os.kill(pid, how)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_is_frozen_is_ended_and_its_prompts_are_scored_again(ray_local, tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.controller.groups.reward_handles._GRACE_S", 1.0)
    folder = make_ring(tmp_path)
    (folder / "odd.py").write_text(ODD)
    with session_of(
        folder, RunFolder(tmp_path / "run"), "{hit: {}, later: {use: 'odd.py:later', timeout_s: 2}}"
    ) as session:
        for step, prompts in session.iterate_prompts("rl"):
            beams = session.rollout.generate(prompts)
            if step == 1:
                _stop(session, "later", signal.SIGSTOP)
            values, _ = stepped(session, step, beams)
            item = beams.get(60.0)["item"]
            np.testing.assert_allclose(values["later"], np.where(item >= 0, item * 0.5, 0))
            if step == 2:
                break
