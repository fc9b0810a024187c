"""Estimators of the policy gradient over drawn groups: without bias, and indifferent to a constant in the reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.bench.rl.estimators import draw_gumbel, draw_independent
from nonet.plugins import load_heavy
from nonet.rl import Draws
from nonet.rl.algorithms import ALGORITHMS, LossInputs

# Shapes: T groups, W beams, I items.
ITEMS, WIDTH, GROUPS = 60, 8, 4000


@pytest.fixture(scope="module")
def world():
    """Make a policy over items [I], its reward with one certain hit, and the exact gradient by the logits."""
    draw = np.random.default_rng(0)
    logit = draw.normal(0, 2, ITEMS)
    chance = np.exp(logit - np.log(np.exp(logit).sum()))
    reward = 0.2 * draw.random(ITEMS)
    reward[draw.choice(ITEMS, p=chance)] += 1
    return chance, reward, chance * (reward - chance @ reward)


def draws_of(chance, how, seed=1, groups=GROUPS):
    item, weight, inclusion = how(np.repeat(chance[None], groups, 0), WIDTH, np.random.default_rng(seed))
    draws = None if weight is None else Draws(torch.from_numpy(weight), torch.from_numpy(inclusion))
    return item, draws


def advantages(name, reward_TW, draws):
    spec = ALGORITHMS.get(name)
    valid = torch.ones(reward_TW.shape, dtype=torch.bool)
    given = {"draws": draws} if draws is not None and spec.weighted else {}
    options = spec.options().model_dump()
    return load_heavy(spec.advantage)(
        {"r": torch.from_numpy(reward_TW)}, {"r": 1.0}, valid, options, lambda moments: moments, **given
    )


def gradients(chance, item, value_TW):
    """Return the estimate of each group [T, I] by the logits."""
    found = np.zeros((len(item), ITEMS))
    np.add.at(found, (np.arange(len(item))[:, None], item), value_TW / WIDTH)
    return found - chance * found.sum(1, keepdims=True)


def spread(chance, exact, each):
    return np.sqrt(((each - exact) ** 2).sum(1).mean()) / np.linalg.norm(exact)


@pytest.mark.parametrize("shift", [0.0, 1.0, 5.0])
def test_rloo_over_gumbel_draws_has_no_bias_and_a_spread_that_no_shift_of_the_reward_changes(world, shift):
    chance, reward, exact = world
    item, draws = draws_of(chance, draw_gumbel)
    plain = gradients(chance, item, advantages("rloo", reward[item], draws).value.numpy())
    each = gradients(chance, item, advantages("rloo", reward[item] + shift, draws).value.numpy())
    error = each.std(0) / np.sqrt(len(each))
    assert (np.abs(each.mean(0) - exact) < 5 * error + 1e-5).all()
    assert spread(chance, exact, each) == pytest.approx(spread(chance, exact, plain), rel=1e-4)


def test_a_constant_reward_has_advantages_of_exactly_zero_in_rloo(world):
    chance, _, _ = world
    item, draws = draws_of(chance, draw_gumbel, groups=64)
    for constant in (0.3, -2.0, 1e6):
        value = advantages("rloo", np.full(item.shape, constant), draws).value
        assert not value.any()


NEUTRAL = sorted(set(ALGORITHMS.list_shipped()) - {"ppo", "reinforce_pp", "rloo"})


@pytest.mark.parametrize("how", [draw_gumbel, draw_independent])
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_group_of_equal_rewards_is_exactly_neutral_where_the_page_says_so(world, name, how):
    chance, reward, _ = world
    item, draws = draws_of(chance, how, groups=8)
    reward_TW = reward[item]
    reward_TW[3] = 0.7
    assert not advantages(name, reward_TW, draws).value[3].any()


def policy_of(chance, item, draws, reference=None, **more):
    """Make the policy of groups as a loss takes it; logits [I] with a gradient."""
    logit = torch.from_numpy(np.log(chance)).requires_grad_()
    logp = logit.log_softmax(0)[torch.from_numpy(item)].unsqueeze(-1)
    valid = torch.ones(item.shape, dtype=torch.bool)
    weight = None if draws is None else draws.scale_weights(valid)
    ref = None if reference is None else reference[torch.from_numpy(item)].unsqueeze(-1)
    given = {"advantage_UW": torch.zeros(item.shape), **more}
    return logit, LossInputs(logp, logp.detach(), valid_UW=valid, ref_UWL=ref, weight_UW=weight, **given)


def direction(name, policy, logit, **options):
    spec = ALGORITHMS.get(name)
    found = load_heavy(spec.loss)(policy, spec.options(**options).model_dump())
    (found.loss / found.count).backward()
    return -logit.grad.numpy()


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("how", [draw_gumbel, draw_independent])
def test_ppo_with_a_perfect_critic_has_the_exact_gradient_over_draws_of_either_kind(world, how):
    chance, reward, exact = world
    item, draws = draws_of(chance, how)
    value = torch.full((*item.shape, 1), float(chance @ reward), dtype=torch.float64)
    found = advantages("ppo", reward[item], draws).value
    logit, policy = policy_of(chance, item, draws, advantage_UW=found, value_UWL=value)
    assert cosine(direction("ppo", policy, logit, kl=0.0, clip=0.2), exact) > 0.999


@pytest.mark.parametrize("how", [draw_gumbel, draw_independent])
def test_the_kl_term_has_its_exact_gradient_over_draws_of_either_kind(world, how):
    chance, _, _ = world
    far = np.log(chance) + np.random.default_rng(4).normal(0, 0.5, ITEMS)
    reference = torch.from_numpy(far).log_softmax(0)
    logit = torch.from_numpy(np.log(chance)).requires_grad_()
    logp = logit.log_softmax(0)
    (logp.exp() * (logp - reference)).sum().backward()
    item, draws = draws_of(chance, how, groups=20_000)
    own, policy = policy_of(chance, item, draws, reference)
    found = direction("grpo", policy, own, kl=1.0, estimator="k2")
    assert cosine(found, -logit.grad.numpy()) > 0.99


def test_ppo_aims_at_the_values_of_before_the_first_pass(world):
    chance, reward, _ = world
    item, _ = draws_of(chance, draw_independent, groups=4)
    before = torch.full((*item.shape, 1), 0.25, dtype=torch.float64)
    now = torch.full((*item.shape, 1), 0.75, dtype=torch.float64)
    given = {"advantage_UW": torch.from_numpy(reward[item]), "value_UWL": now, "baseline_UWL": before}
    _, policy = policy_of(chance, item, None, **given)
    found = load_heavy(ALGORITHMS.get("ppo").loss)(policy, ALGORITHMS.get("ppo").options(kl=0.0).model_dump())
    # one level: the return is the reward, whatever the values, and the advantage is the reward less 0.25
    error = ((0.75 - reward[item]) ** 2 / 2).sum()
    assert found.more["value_error"].item() == pytest.approx(error)
    assert (found.loss - found.more["value_error"]).item() == pytest.approx(-(reward[item] - 0.25).sum())
