"""Every algorithm's advantage and loss against numbers worked out by hand."""

from __future__ import annotations

from math import exp, log, log1p, sqrt

import pytest
import torch

from nonet.plugins import load_heavy
from nonet.rl.algorithms import ALGORITHMS, LossInputs

REWARD = torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
VALID = torch.ones(2, 4, dtype=torch.bool)


def options_of(name, **own):
    spec = ALGORITHMS.get(name)
    return spec.options.model_validate(own).model_dump()


def advantage(name, reward=REWARD, valid=VALID, **own):
    return load_heavy(ALGORITHMS.get(name).advantage)(
        {"hit": reward}, {"hit": 1.0}, valid, options_of(name, **own), lambda moments: moments
    )


def policy(ratios, advantages, ref=None, old=-1.0, **more):
    """One user; beams [W] of L levels with these ratios to an old log-probability."""
    old_UWL = torch.full((1, len(ratios), len(ratios[0])), old, dtype=torch.float64)
    logp_UWL = (old_UWL + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    valid_UW = torch.ones(1, len(ratios), dtype=torch.bool)
    ref_UWL = None if ref is None else torch.tensor([ref], dtype=torch.float64)
    return LossInputs(logp_UWL, old_UWL, torch.tensor([advantages]), valid_UW, ref_UWL, **more)


def loss(name, policy, **own):
    return load_heavy(ALGORITHMS.get(name).loss)(policy, options_of(name, **own))


def test_dr_grpo_takes_the_mean_off_and_leaves_the_spread():
    found = advantage("dr_grpo")
    assert found.value.tolist() == [[0.75, -0.25, -0.25, -0.25], [1.0, 1.0, -1.0, -1.0]]


def test_dapo_uses_groups_with_a_spread_alone_and_clips_wider_upwards():
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = advantage("dapo", reward)
    assert found.used_U.tolist() == [True, False]
    assert found.value[0].tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-6)
    assert loss("dapo", policy([[1.27], [1.5]], [1.0, 1.0])).loss.item() == pytest.approx(-(1.27 + 1.28))
    assert ALGORITHMS.get("dapo").oversample(options_of("dapo", oversample=2.0)) == 2.0


def test_rloo_s_baseline_is_the_mean_of_the_others_and_its_ratio_that_of_the_item():
    found = advantage("rloo")
    assert found.value.tolist() == [
        pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3]),
        pytest.approx([4 / 3] * 2 + [-4 / 3] * 2),
    ]
    result = loss("rloo", policy([[2.0, 3.0]], [0.5]))
    assert (result.loss.item(), int(result.count)) == (
        pytest.approx(-0.5 * 6.0),
        1,
    )  # no clip: one ratio 2 * 3


def test_reinforce_pp_whitens_over_the_batch():
    # values 1 0 0 0 2 2 0 0: mean 5/8, squares 9, variance (9 - 25/8) / 7
    spread = sqrt((9 - 25 / 8) / 7)
    found = advantage("reinforce_pp").value
    assert found[0].tolist() == pytest.approx([(1 - 5 / 8) / spread] + [-5 / 8 / spread] * 3, rel=1e-6)
    # each group's mean off first: .75 -.25 -.25 -.25 1 1 -1 -1, squares 4.75, mean 0
    of_group = advantage("reinforce_pp", baseline="group").value
    assert of_group[0, 0].item() == pytest.approx(0.75 / sqrt(4.75 / 7), rel=1e-6)
    # k2 = d^2 / 2, whose gradient is -d
    result = policy([[1.0]], [0.0], ref=[[-1.0 + log(2)]])
    found = loss("reinforce_pp", result, kl=0.5)
    assert found.kl.item() == pytest.approx(log(2) ** 2 / 2)
    found.loss.backward()
    assert result.logp_UWL.grad.item() == pytest.approx(-0.5 * log(2))


def test_k1_is_minus_the_difference_and_its_gradient_is_a_constant():
    one = policy([[1.0]], [0.0], ref=[[-1.0 + log(2)]])
    found = loss("grpo", one, kl=0.5, estimator="k1")
    assert found.kl.item() == pytest.approx(-log(2))
    found.loss.backward()
    assert one.logp_UWL.grad.item() == pytest.approx(
        0.5
    )  # whatever the reference: in expectation it pulls nowhere


def test_gspo_has_the_geometric_mean_of_ratios_and_a_narrow_clip():
    result = loss("gspo", policy([[1.0002, 1.0002], [1.5, 0.5]], [1.0, 1.0]))
    assert result.loss.item() == pytest.approx(-(1.0002 + sqrt(0.75)))
    assert loss("gspo", policy([[1.21, 1.0]], [1.0])).loss.item() == pytest.approx(-1.0004)  # 1.1 is clipped


def test_ecpo_bounds_a_bad_item_s_ratio_and_keeps_its_gradient():
    one = policy([[2.0, 2.0], [1.1, 1.0]], [-1.0, -1.0])  # ratios 4, held at 1 + 0.2 + 0.1, and 1.1
    found = loss("ecpo", one)
    assert found.loss.item() == pytest.approx(1.3 + 1.1)
    found.loss.backward()
    assert one.logp_UWL.grad[0].tolist() == [pytest.approx([1.3, 1.3]), pytest.approx([1.1, 1.1])]
    good = loss("ecpo", policy([[2.0, 2.0]], [1.0]))  # a good item is clipped at 1.2 as ever
    assert good.loss.item() == pytest.approx(-1.2)


def test_gbpo_has_the_gradient_of_a_binary_cross_entropy_at_most():
    # old 0.5; present 0.8. Good: the old one is lifted to 0.8, ratio 1. Bad: max(0.5, 1 - 0.8) = 0.5, ratio 1.6.
    one = policy([[1.6], [1.6]], [1.0, -1.0], old=log(0.5))
    found = loss("gbpo", one)
    assert found.loss.item() == pytest.approx(-1.0 + 1.6)
    # a bad beam that is unlikely: old 0.01, present 0.02, lifted to 0.98
    rare = policy([[2.0]], [-1.0], old=log(0.01))
    loss("gbpo", rare).loss.backward()
    assert rare.logp_UWL.grad.item() == pytest.approx(0.02 / 0.98)
    assert loss("gbpo", policy([[0.5]], [1.0], old=log(0.5))).loss.item() == pytest.approx(-0.5)


def test_ppo_takes_values_off_level_by_level():
    values = torch.tensor([[[0.5, 0.25]]], dtype=torch.float64, requires_grad=True)
    one = policy([[1.0, 1.0]], [1.0], value_UWL=values)
    found = loss("ppo", one, kl=0.0, decay=0.5)
    # surprises: 0.25 - 0.5 = -0.25, then 1 - 0.25 = 0.75; A = -0.25 + 0.5 * 0.75 = 0.125 and 0.75; returns 0.625 and 1
    error = ((0.5 - 0.625) ** 2 + (0.25 - 1.0) ** 2) / 2
    assert found.loss.item() == pytest.approx(-(0.125 + 0.75) + error)
    assert found.more["value_error"].item() == pytest.approx(error)
    found.loss.backward()
    assert one.logp_UWL.grad.flatten().tolist() == pytest.approx([-0.125, -0.75])
    assert values.grad.flatten().tolist() == pytest.approx([0.5 - 0.625, 0.25 - 1.0])


def test_dpo_sets_the_best_beam_against_the_worst():
    reward = torch.tensor([[0.5, 1.0, 0.0, 0.2], [1.0, 1.0, 1.0, 1.0]])
    found = advantage("dpo", reward)
    assert found.value.tolist() == [[0.0, 1.0, -1.0, 0.0], [0.0] * 4]
    one = policy([[1.0], [exp(1.0)], [exp(-2.0)]], [0.0, 1.0, -1.0], ref=[[-1.0], [-1.0], [-1.0]])
    result = loss("dpo", one, beta=0.1)
    assert result.loss.item() == pytest.approx(log1p(exp(-0.1 * 3)))
    assert (int(result.count), result.more["preferred"].item()) == (1, 1.0)
    result.loss.backward()
    pull = 0.1 / (1 + exp(0.3))
    assert one.logp_UWL.grad.flatten().tolist() == pytest.approx([0.0, -pull, pull])


def test_s_dpo_sets_it_against_several_at_once():
    found = advantage("dpo", torch.tensor([[0.5, 1.0, 0.0, 0.2]]), VALID[:1], negatives=2)
    assert found.value.tolist() == [[0.0, 1.0, -1.0, -1.0]]
    one = policy([[1.0], [exp(1.0)], [exp(-2.0)]], [-1.0, 1.0, -1.0], ref=[[-1.0], [-1.0], [-1.0]])
    assert loss("dpo", one, beta=0.1).loss.item() == pytest.approx(log1p(exp(-0.1) + exp(-0.3)))


def test_sp_dpo_sets_what_the_user_took_against_the_policy_s_own_beams():
    found = advantage("dpo", REWARD, chosen="target", negatives=3)
    assert found.value[0].tolist() == [0.0, -1.0, -1.0, -1.0]
    one = policy(
        [[1.0], [exp(-2.0)]],
        [-1.0, -1.0],
        ref=[[-1.0], [-1.0]],
        target_UL=torch.tensor([[-0.5]], dtype=torch.float64),
        target_ref_UL=torch.tensor([[-1.5]], dtype=torch.float64),
        taken_UW=torch.tensor([[False, True]]),
    )
    # the target gained 1; the first beam 0; the second is the target itself and stands against nobody
    assert loss("dpo", one, chosen="target", beta=0.1).loss.item() == pytest.approx(log1p(exp(-0.1)))


def test_rsft_learns_the_next_event_of_the_better_half():
    reward = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 1.0], [0.0, 0.2]])
    found = advantage("rsft", reward, torch.ones(4, 2, dtype=torch.bool))
    assert found.group_U.tolist() == [1.0, 0.0, 1.0, 0.0]
    target = torch.tensor([[-2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    one = policy([[1.0, 1.0], [1.0, 1.0]], [0.0, 0.0], target_UL=target, group_U=torch.ones(1))
    result = loss("rsft", one, weight=0.5)
    assert result.loss.item() == pytest.approx(0.5 * 2 * 5.0)  # as much as its two beams
    result.loss.backward()
    assert target.grad.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("name", ALGORITHMS.list_shipped())
def test_a_group_without_a_valid_beam_moves_nothing_in_any_algorithm(name):
    spec, own = ALGORITHMS.get(name), options_of(name)
    rewards = {"hit": torch.tensor([[0.0, 0.0], [1.0, 0.0]])}
    valid = torch.tensor([[False, False], [True, True]])
    found = load_heavy(spec.advantage)(rewards, {"hit": 1.0}, valid, own, lambda moments: moments)
    assert found.value[0].tolist() == [0.0, 0.0]
    logp = torch.tensor([[[torch.nan], [0.0]], [[-1.0], [-2.0]]], requires_grad=True)
    old = torch.where(valid[..., None], logp.detach(), 0.0)
    group = torch.zeros(2)
    target = torch.full((2, 1), -1.0)
    head = torch.zeros(2, 2, 1)
    given = LossInputs(
        logp, old, found.value, valid, old, target, target, torch.zeros(2, 2, dtype=torch.bool), head, group
    )
    result = load_heavy(spec.loss)(given, own)
    result.loss.backward()
    assert logp.grad[0].flatten().tolist() == [0.0, 0.0]
    assert torch.isfinite(result.loss)
    assert set(result.more) == set(spec.more)


def test_rsft_filters_by_a_column_of_logged_feedback_and_never_keeps_a_missing_value():
    reward, valid = torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool)
    spec = ALGORITHMS.get("rsft")
    own = options_of("rsft", feedback="rating", better=0.5)
    assert spec.feedback_column(own) == "rating"
    rating = torch.tensor([5.0, 1.0, 3.0, float("nan")], dtype=torch.float64)
    found = load_heavy(spec.advantage)(
        {"hit": reward}, {"hit": 1.0}, valid, own, lambda m: m, feedback_U=rating
    )
    assert found.group_U.tolist() == [1.0, 0.0, 1.0, 0.0]
