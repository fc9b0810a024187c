"""What rewards are compared on before and after RL: a bounded sample, asked in bounded parts; and what comes back. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from local_groups import LocalGroup
from tests_ring import make_ring

from nonet.controller.groups.handles import RolloutHandle
from nonet.controller.groups.reward_handles import RewardHandles
from nonet.controller.report import _compare_rewards
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import list_reward_options, make_run_setup, make_stage_setups
from nonet.controller.stages._loops import probe_rewards, try_rewards
from nonet.deadlines import DEFAULTS
from nonet.workers.roles.artifacts.tokenizer import Tokeniser
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.reward import RewardWorker
from nonet.workers.roles.rollout import Rollout
from nonet.workers.roles.trainer import Trainer
from nonet.workers.runtime.worker import Place


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenise the ring, with a rollout and its rewards in this process."""
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    scenario, beside = load_scenario(folder / "ring.yaml")
    facts = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    run = make_run_setup(scenario)
    shard, trainer, rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
    trainer.place = Place(role="trainer", peers={"embedding": shard})
    rollout.place = Place(role="rollout", peers={"trainer": trainer, "embedding": shard})
    trainer.open(folders)
    rollout.open(folders)
    rollout.apply(1)
    rewards = {}
    for _, name, options in list_reward_options(scenario):
        rewards[name] = RewardWorker(name, options.use or name, str(folder), options.get_options())
        rewards[name].setup()
        rewards[name].open(folders)
    return SimpleNamespace(folder=folder, facts=facts["data"], rollout=rollout, rewards=rewards)


def session_of(made, *changes):
    scenario, _ = load_scenario(made.folder / "ring.yaml", list(changes))
    handle = RolloutHandle(LocalGroup(made.rollout), {"rl": {"width": 4}})  # type: ignore[arg-type]
    rewards = RewardHandles(
        {n: LocalGroup(w) for n, w in made.rewards.items()}, dict.fromkeys(made.rewards, 9.0)
    )  # type: ignore[arg-type]
    return SimpleNamespace(
        scenario=scenario,
        stages=make_stage_setups(scenario, made.facts["users"], made.facts["trained_events"]),
        rollout=SimpleNamespace(group=handle.group, generate=lambda prompts: handle.generate(prompts, 1)),
        deadlines=DEFAULTS,
        publish=lambda name: None,
        get_rewards=lambda name: rewards,
        compute_current_weights=lambda name: {"hit": 1.0, "own": 0.5},
    )


def sizes(session):
    return [len(args[0].value) for method, args in session.rollout.group.asked if method == "generate"]


def test_a_probe_asks_no_more_at_once_than_a_step_does_and_finds_the_same(made):
    whole = probe_rewards(session_of(made, "stages.rl.users=1000"), "rl")
    session = session_of(made, "stages.rl.users=5")
    parts = probe_rewards(session, "rl")
    asked = len(made.rollout.draw_held_out_prompts()[0])
    assert asked > 10
    assert sizes(session) == [5] * (asked // 5) + [asked % 5] * (asked % 5 > 0)
    assert {"hit", "own", "weight.hit", "weight.own", "total", "user", "of"} == set(parts)
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, err_msg=name)
    np.testing.assert_allclose(parts["total"], parts["hit"] + 0.5 * parts["own"])


def test_the_probe_is_a_sample_that_is_the_same_before_and_after(made):
    session = session_of(made, "stages.rl.probe=7")
    before, after = probe_rewards(session, "rl"), probe_rewards(session, "rl")
    assert len(before["user"]) == 7
    assert before["of"] == len(made.rollout.draw_held_out_prompts()[0])
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
    users, positions = (
        set(map(tuple, np.stack(made.rollout.draw_held_out_prompts(n), 1))) for n in (7, None)
    )
    assert users < positions, "drawn from the held-out users' RL events"
    assert set(before["user"]) <= set(made.rollout._select_held_out_users())


def test_where_there_are_fewer_prompts_than_the_probe_wants_it_takes_all(made):
    every = made.rollout.draw_held_out_prompts()
    for most in (len(every[0]), 2000):
        np.testing.assert_array_equal(made.rollout.draw_held_out_prompts(most), every)


def test_the_report_says_how_many_of_how_many_prompts_rewards_were_compared_on(made, tmp_path):
    session = session_of(made, "stages.rl.probe=7")
    for when in ("before", "after"):
        np.savez(tmp_path / f"rl.rewards.{when}.npz", **probe_rewards(session, "rl"))  # type: ignore[arg-type]
    report = _compare_rewards(SimpleNamespace(results=tmp_path), session.scenario)  # type: ignore[arg-type]
    assert set(report["rewards"]) == {"hit", "own", "total"}
    of = len(made.rollout.draw_held_out_prompts()[0])
    assert report["rewards_on"].startswith(f"7 prompts of {of}, drawn by the seed, of ")


def test_a_rehearsal_asks_a_few_prompts(made):
    session = session_of(made)
    try_rewards(session)  # type: ignore[arg-type]
    assert sizes(session) == [8]
