"""What rewards count: ramps, floors and what is put in between; a floor's multiplier finds the weight that holds it."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.controller.scenario.options import Ramp, RewardOptions
from nonet.controller.session.objectives import RewardObjectives, sum_by_scene
from nonet.workers.roles import SceneSetup


def test_a_ramp_is_a_straight_line_and_stays_at_its_end():
    ramp = Ramp(start=1.0, end=0.0, steps=4, after=2)
    assert [ramp.compute_weight(step) for step in (0, 2, 3, 6, 100)] == [1.0, 1.0, 0.75, 0.0, 0.0]
    objectives = RewardObjectives({"a": RewardOptions(weight=ramp), "b": RewardOptions(weight=2.0)})
    assert objectives.compute_weights(3) == {"a": 0.75, "b": 2.0}
    assert objectives.update_multipliers(3, {"reward.a": 1.0}) == {"weight.a": 0.75}


def test_a_floor_that_is_missed_counts_more_each_step_and_never_below_zero():
    objectives = RewardObjectives(
        {"a": RewardOptions(weight=1.0), "b": RewardOptions(weight=0.0, at_least=0.5)}
    )
    seen = []
    for step in range(3):
        seen.append(objectives.compute_weights(step)["b"])
        objectives.update_multipliers(step, {"reward.a": 1.0, "reward.b": 0.25})
    assert seen == pytest.approx([0.0, 1.525, 1.55])  # half is missing: 3 of it at once, 0.05 of it a step
    for step in range(100):
        objectives.update_multipliers(step, {"reward.b": 5.0})
    assert objectives.compute_multipliers(100) == {"b": 0.0}


def test_a_multiplier_is_in_units_of_what_the_other_rewards_count():
    seen = []
    for weight in (1.0, 10.0):
        rewards = {"a": RewardOptions(weight=weight), "b": RewardOptions(weight=0.0, at_least=0.5)}
        objectives = RewardObjectives(rewards)
        objectives.update_multipliers(0, {"reward.b": 0.25})
        seen.append(objectives.compute_weights(1)["b"])
    assert seen[1] == pytest.approx(10 * seen[0])


def test_one_odd_step_moves_a_multiplier_by_a_fifth_of_what_a_steady_lack_does():
    objectives = RewardObjectives({"a": RewardOptions(), "b": RewardOptions(weight=0.0, at_least=1.0)})
    objectives.update_multipliers(0, {"reward.b": 1.0})
    objectives.update_multipliers(1, {"reward.b": 0.5})
    assert objectives.compute_weights(2)["b"] == pytest.approx(0.2 * 0.5 * 3.0 + 0.05 * 0.5)
    assert objectives.compute_shortfall({"a": 0.0, "b": 0.9}) == pytest.approx(0.1)
    assert objectives.compute_shortfall({"a": 0.0, "b": 1.1}) == 0.0


def test_what_is_restored_goes_on_as_it_was():
    rewards = {"b": RewardOptions(at_least=0.5)}
    one, other = RewardObjectives(rewards), RewardObjectives(rewards)
    one.update_multipliers(0, {"reward.b": 0.1})
    other.restore(one.get_state())
    assert other.compute_weights(1) == one.compute_weights(1)
    assert RewardObjectives({"a": RewardOptions()}).get_state() == {}


def test_the_multiplier_finds_the_weight_that_holds_the_floor():
    """Two rewards of one policy over three items: the second only rises where the first falls."""
    a, b = np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.6, 1.0])
    objectives, logits = (
        RewardObjectives({"a": RewardOptions(), "b": RewardOptions(weight=0.0, at_least=0.5)}),
        np.zeros(3),
    )
    means = []
    for step in range(3000):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        weights = objectives.compute_weights(step)
        means.append(float(p @ b))
        objectives.update_multipliers(step, {"reward.a": float(p @ a), "reward.b": means[-1]})
        value = weights["a"] * a + weights["b"] * b
        logits += 0.3 * p * (value - p @ value)
    assert np.mean(means[-600:]) == pytest.approx(0.5, abs=0.01)


def test_a_floor_is_steered_by_the_lists_that_would_be_served_and_not_by_what_rollouts_drew():
    """Draws say 0.21 and lists 0.105: the floor of 0.15 is missed by 30 %, whatever the draws say."""
    objectives = RewardObjectives(
        {"hit": RewardOptions(), "novelty": RewardOptions(weight=0.0, at_least=0.15)}
    )
    objectives.note_served({"hit": 0.1, "novelty": 0.105})
    objectives.update_multipliers(0, {"reward.hit": 0.01, "reward.novelty": 0.21})
    assert objectives.compute_multipliers(1)["novelty"] == pytest.approx((0.05 + 3.0) * 0.3)
    objectives.update_multipliers(1, {"reward.novelty": 0.3})  # half of it is served: the floor holds
    assert objectives.compute_multipliers(2)["novelty"] == pytest.approx(0.05 * 0.3 + 3.0 * 0.8 * 0.3)
    again = RewardObjectives(objectives.rewards)
    again.restore(objectives.get_state())
    for each in (objectives, again):
        each.update_multipliers(2, {"reward.novelty": 0.2})
    assert again.compute_weights(3) == objectives.compute_weights(3)


def test_what_was_served_is_kept_over_a_resume_before_the_next_step():
    rewards = {"novelty": RewardOptions(weight=0.0, at_least=0.15)}
    one, other = RewardObjectives(rewards), RewardObjectives(rewards)
    one.note_served({"novelty": 0.1})
    other.restore(one.get_state())
    for each in (one, other):
        each.update_multipliers(0, {"reward.novelty": 0.2})
    assert one.compute_weights(1) == other.compute_weights(1) != RewardObjectives(rewards).compute_weights(1)


def test_a_state_of_earlier_versions_is_restored_without_a_ratio():
    objectives = RewardObjectives({"b": RewardOptions(at_least=0.5)})
    objectives.restore({"floors": {"b": [0.2, 0.1]}})
    assert objectives.compute_multipliers(0) == {"b": pytest.approx(0.5)}


def test_a_total_counts_each_scene_by_its_own_weights():
    objectives = RewardObjectives({"hit": RewardOptions(weight=1.0), "own": RewardOptions(weight=2.0)})
    scenes = SceneSetup("surface", ("home",), (None, None), ({"own": 10.0},))
    mean, scene = np.array([1.0, 3.0, 5.0, 7.0]), np.array([0, 1, 1, 0])
    there = np.array([True, True, True, False])
    parts = {"hit": sum_by_scene(mean, there, scene, 2), "own": sum_by_scene(mean, there, scene, 2)}
    assert parts["hit"] == pytest.approx([1 / 3, 8 / 3])
    assert objectives.compute_total(parts, 0, scenes) == pytest.approx(3 + (10 * 1 + 2 * 8) / 3)
    assert objectives.compute_total({"hit": [3.0]}, 0) is None, "a reward that counts was not measured"
