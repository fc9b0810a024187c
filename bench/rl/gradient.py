"""Measures the bias and variance of policy gradient estimators, and the gain of RL algorithms relative to exact ascent.

The gradient of an estimator is a sum of the items' gradients of log-probability, each times a coefficient. Therefore the
coefficients of many groups are averaged first, and one backward pass per average gives the mean gradient. With `--set
draws=400000`, the error of a bias is about 1 %.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.bench.rl.estimators import ESTIMATORS, Estimator, compute_coefficients
from nonet.bench.rl.picture import draw_picture
from nonet.bench.rl.small_world import SmallWorld, write_world

# Shapes: U prompts, I items.

_BLOCK_GROUPS = 2000  # number of groups whose coefficients are averaged at once
_PROMPTS, _ALGORITHM_PROMPTS = 8, 32  # number of prompts for estimators, and for algorithms
_MAX_BACKWARD_PASSES = 20


def bench_gradient(
    draws: int = 20_000,
    steps: int = 60,
    widths: tuple[int, ...] | list[int] = (4, 16),
    memory: str = "on",
    picture: str = "",
    only: str = "",
) -> dict[str, Any]:
    """Measure the gradient estimators and the RL algorithms.

    Args:
        draws: Number of groups per prompt and estimator.
        steps: Number of steps of each algorithm; 0 to leave the algorithms out.
        widths: Numbers of items of a group.
        memory: Whether the model has a memory, "on" or "off".
        picture: The SVG file to write, or "" for none.
        only: A text; only estimators whose title contains it are measured.

    Returns:
        A row per estimator and width: the cosine and the norm ratio of its mean gradient to the exact one, its bias, the error
        of the bias, and the spread of one group. A row per algorithm: its gain as a share of that of exact ascent.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            world, files = _train_world(Path(folder), memory)
            brute_force_error, rows = _measure_estimators(world, draws, list(widths), only)
            algorithm_rows = _measure_algorithms(files, steps) if steps else []
    finally:
        torch.set_num_threads(threads)
    if picture:
        Path(picture).write_text(draw_picture(rows, algorithm_rows), encoding="utf-8")
    return {
        "rows": rows + algorithm_rows,
        "ratio": {"exact against brute force, relative": brute_force_error},
    }


def _train_world(folder: Path, memory: str) -> tuple[SmallWorld, tuple[Path, dict[str, str], Path]]:
    """Train a small world, and return it with the paths of its scenario, artifacts and checkpoint."""
    from nonet.controller.scenario import load_scenario
    from nonet.controller.setup import make_data_setup
    from nonet.workers.roles.artifacts import Tokeniser

    path = write_world(folder, memory)
    scenario, scenario_dir = load_scenario(path)
    prepared: dict[str, Any] = Tokeniser().prepare(make_data_setup(scenario, scenario_dir), str(folder))
    folders = {kind: artifact["path"] for kind, artifact in prepared["artifacts"].items()}
    world = SmallWorld(path, folders, [])
    return world, (path, folders, world.save(folder / "taught"))


def _measure_estimators(
    world: SmallWorld, draws: int, widths: list[int], only: str
) -> tuple[float, list[dict[str, Any]]]:
    """Return the relative difference of the exact and the brute-force gradient, and a row per estimator and width."""
    prompts = world.lease_prompts(_PROMPTS)
    reward_UI = world.compute_rewards(*prompts)
    weights = [p for p in world.model.parameters() if p.requires_grad]

    def compute_flat_gradient(value: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(value, weights, allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1).double()
                for p, g in zip(weights, grads, strict=True)
            ]
        )

    exact = compute_flat_gradient(world.compute_expected_reward(*prompts, torch.from_numpy(reward_UI)).mean())
    allowed = torch.from_numpy(world.compute_allowed(*prompts))
    logp_UI = world.compute_log_probs(*prompts)
    policy_logp_UI = torch.where(allowed, logp_UI.double(), -torch.inf).log_softmax(1)
    brute_force = compute_flat_gradient((policy_logp_UI.exp() * torch.from_numpy(reward_UI)).sum(1).mean())
    probability_UI = policy_logp_UI.exp().detach().numpy()

    def compute_weighted_gradient(coefficient_UI: np.ndarray) -> torch.Tensor:
        return compute_flat_gradient(
            (torch.from_numpy(coefficient_UI).float() * world.compute_log_probs(*prompts)).sum() / _PROMPTS
        )

    rows = [
        _measure_estimator(
            estimator, width, exact, compute_weighted_gradient, probability_UI, reward_UI, draws
        )
        for width in widths
        for estimator in ESTIMATORS
        if only in estimator.title
    ]
    return float((exact - brute_force).norm() / exact.norm()), rows


def _measure_estimator(
    estimator: Estimator,
    width: int,
    exact: torch.Tensor,
    compute_gradient: Any,
    probability: np.ndarray,
    reward: np.ndarray,
    draws: int,
) -> dict[str, Any]:
    """Measure the bias and spread of one estimator.

    Args:
        estimator: The estimator.
        width: Number of items of a group.
        exact: The exact gradient.
        compute_gradient: Returns the gradient of the log-probabilities weighted by coefficients [U, I].
        probability: The probability of each item [U, I].
        reward: The reward of each item [U, I].
        draws: Number of groups per prompt.
    """
    blocks = 1 if estimator.group.__name__ == "take_top" else max(4, draws // _BLOCK_GROUPS)
    block_groups = 1 if blocks == 1 else _BLOCK_GROUPS
    coefficients = [
        compute_coefficients(estimator, probability, reward, width, block_groups, seed)
        for seed in range(blocks)
    ]
    passes = max(1, min(blocks, _MAX_BACKWARD_PASSES))
    means = [compute_gradient(np.mean(part, 0)) for part in np.array_split(np.stack(coefficients), passes)]
    mean = torch.stack(means).mean(0)
    squared_deviation = torch.stack([(part - mean).norm() ** 2 for part in means]).sum()
    error = float(squared_deviation / max(1, passes * (passes - 1))) ** 0.5  # standard error of the mean
    exact_norm = float(exact.norm())
    distance = float((mean - exact).norm())
    return {
        "estimator": estimator.title,
        "W": width,
        "cosine": float(mean @ exact / (mean.norm() * exact_norm).clamp_min(1e-30)),
        "norm ratio": float(mean.norm()) / exact_norm,
        "bias": max(0.0, distance**2 - error**2) ** 0.5 / exact_norm,
        "known to": error / exact_norm,
        "spread of one group": error / exact_norm * (blocks * block_groups) ** 0.5 * _PROMPTS**0.5,
    }


# Title, algorithm and rollout of each measured RL algorithm.
_ALGORITHMS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("GRPO, beam", {"use": "grpo", "kl": 0.0}, {"use": "beam"}),
    ("GRPO, sample", {"use": "grpo", "kl": 0.0}, {"use": "sample"}),
    ("GRPO, Gumbel", {"use": "grpo", "kl": 0.0}, {"use": "gumbel"}),
    ("Dr. GRPO, beam", {"use": "dr_grpo"}, {"use": "beam"}),
    ("DAPO, beam", {"use": "dapo"}, {"use": "beam"}),
    ("RLOO, sample", {"use": "rloo"}, {"use": "sample"}),
    ("RLOO, Gumbel", {"use": "rloo"}, {"use": "gumbel"}),
    ("RLOO, Gumbel and target", {"use": "rloo"}, {"use": "gumbel", "with_target": True}),
    ("RLOO, beam + tail", {"use": "rloo"}, {"use": "beam", "tail": 4}),
    ("REINFORCE++, sample", {"use": "reinforce_pp", "kl": 0.0}, {"use": "sample"}),
    ("GSPO, beam", {"use": "gspo"}, {"use": "beam"}),
    ("ECPO, beam", {"use": "ecpo"}, {"use": "beam"}),
    ("GBPO, beam", {"use": "gbpo"}, {"use": "beam"}),
    ("PPO, sample", {"use": "ppo", "kl": 0.0}, {"use": "sample"}),
    ("DPO, beam", {"use": "dpo"}, {"use": "beam"}),
    ("S-DPO, beam", {"use": "dpo", "negatives": 4}, {"use": "beam"}),
    ("SP-DPO, beam", {"use": "dpo", "chosen": "target", "negatives": 4}, {"use": "beam"}),
    ("RSFT, beam", {"use": "rsft"}, {"use": "beam"}),
)


def _measure_algorithms(files: tuple[Path, dict[str, str], Path], steps: int) -> list[dict[str, Any]]:
    """Train each algorithm, and return a row with its gain in exact expected reward as a share of that of exact ascent."""
    import json

    path, folders, checkpoint = files
    world = SmallWorld(path, folders, [], checkpoint)
    first, ceiling = _ascend_exactly(world, steps)
    rows = [{"algorithm": "exact gradient", "from": first, "to": ceiling, "share of the ceiling": 1.0}]
    for title, algorithm, rollout in _ALGORITHMS:
        changes = [
            f"stages.rl.algorithm={json.dumps(algorithm)}",
            f"stages.rl.rollout={json.dumps(rollout | {'width': 16})}",
        ]
        end = _run_updates(SmallWorld(path, folders, changes, checkpoint), steps)
        share = (end - first) / (ceiling - first)
        rows.append({"algorithm": title, "from": first, "to": end, "share of the ceiling": share})
    return rows


def _compute_mean_reward(world: SmallWorld) -> torch.Tensor:
    """Return the exact expected reward of the policy, averaged over the prompts, with a gradient."""
    prompts = world.lease_prompts(_ALGORITHM_PROMPTS)
    return world.compute_expected_reward(*prompts, torch.from_numpy(world.compute_rewards(*prompts))).mean()


def _ascend_exactly(world: SmallWorld, steps: int) -> tuple[float, float]:
    """Ascend the exact gradient with the trainer's optimizer, and return the expected reward before and after."""
    first = float(_compute_mean_reward(world).detach())
    for _ in range(steps):
        world.trainer.dense.backward(-_compute_mean_reward(world).float())
        world.trainer.dense.clip()
        world.trainer.dense.step(world.stages["rl"].lr.peak)
    return first, float(_compute_mean_reward(world).detach())


def _run_updates(world: SmallWorld, steps: int) -> float:
    """Run RL steps with Nonet's rollout and trainer on the same prompts, and return the expected reward after them."""
    from nonet.workers.roles import UpdateRequest

    prompts = world.lease_prompts(_ALGORITHM_PROMPTS)
    reward_UI = world.compute_rewards(*prompts)
    stage = world.stages["rl"]
    for step in range(steps):
        beams = world.generate_beams(*prompts, step, 16)
        scores = np.take_along_axis(reward_UI, np.maximum(beams["item"], 0), 1)
        world.trainer.update(
            UpdateRequest(stage, step), beams, {"hit": np.where(beams["valid"], scores, 0).astype(np.float32)}
        )
    return float(_compute_mean_reward(world).detach())
