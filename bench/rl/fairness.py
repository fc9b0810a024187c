"""`nonet bench fairness`: baselines for RL from finished runs: continued finetuning, and re-ranking by the same rewards.

All methods start from the checkpoint from which RL started, and are measured on the lists of users on whom RL never trains.
These users are split by a hash: one third ("choose") selects the learning rate or the multiplier of a method, the one with the
highest trained reward that keeps 98 % of NDCG@10; the results are those of the other two thirds ("report"). The results of RL
are those of the run's own checkpoint. The rewards must be functions or classes of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.rl.small_world import SmallWorld
from nonet.errors import ConfigError
from nonet.random import hash_words

# Shapes: U prompts, W items of a list, C candidates.

RATES = (1e-5, 3e-5, 1e-4, 3e-4)  # learning rates of continued finetuning
MULTIPLIERS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)  # of the rewards in re-ranking, in nats
_MIN_NDCG_SHARE = 0.98  # of the start's NDCG@10, which a point must keep to be selected
_CANDIDATES_PER_ITEM = 4  # number of beams that are re-ranked, as a multiple of the length of a list
_STAGE = "rl"

# Trained reward and NDCG@10, by part of the users: "choose" and "report".
Measures = dict[str, tuple[float, float]]


def bench_fairness(*, runs: str = "", rates: str = "") -> dict[str, Any]:
    """Compare RL with its controls and with re-ranking.

    Args:
        runs: A run's folder, or a folder of runs `seed-*` as `nonet run --seeds` makes it.
        rates: Learning rates of the controls, such as "1e-5,3e-5".

    Returns:
        A row for each run, method and point (a learning rate or multiplier): trained reward and NDCG@10 of the users "report",
        as multiples of the start's, and whether the point was chosen. The ratios are medians over the runs of the chosen points.

    Raises:
        ConfigError: No runs are named.
    """
    import torch

    if not runs:
        raise ConfigError(
            "fairness compares finished runs: --set runs=FOLDER, of a run or of `nonet run --seeds`"
        )
    torch.set_num_threads(1)
    runs_folder = Path(runs)
    is_run = (runs_folder / "scenario.yaml").exists()
    folders = [runs_folder] if is_run else sorted(runs_folder.glob("seed-*"))
    learning_rates = [float(rate) for rate in rates.split(",")] if rates else list(RATES)
    rows = [row for folder in folders for row in _measure_run(folder, learning_rates)]
    ratio = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        chosen_rows = [row for row in rows if row["method"] == method and row["chosen"]]
        for name in ("reward", "ndcg@10"):
            median = float(np.median([row[name] for row in chosen_rows]))
            ratio[f"{method}: {name} over the start's, median of {len(chosen_rows)}"] = median
    return {"rows": rows, "ratio": ratio}


def _measure_run(folder: Path, rates: list[float]) -> list[dict[str, Any]]:
    """Return the rows of one run: those of all points of each method, with the one that was chosen."""
    world, rows = _RunWorld(folder), []
    start = world.measure_reranked(0.0)
    for method, points in _make_curves(world, rates).items():
        measured = {title: measure() for title, measure in points.items()}
        min_ndcg = _MIN_NDCG_SHARE * start["choose"][1]
        allowed = [title for title, measures in measured.items() if measures["choose"][1] >= min_ndcg]
        allowed = allowed or list(measured)[:1]
        chosen = max(allowed, key=lambda title: measured[title]["choose"][0])
        for title, measures in measured.items():
            reward, ndcg = (round(measures["report"][i] / start["report"][i], 4) for i in (0, 1))
            rows.append(
                {
                    "run": folder.name,
                    "method": method,
                    "point": title,
                    "reward": reward,
                    "ndcg@10": ndcg,
                    "chosen": title == chosen,
                }
            )
    return rows


def _make_curves(world: _RunWorld, rates: list[float]) -> dict[str, dict[str, Callable[[], Measures]]]:
    """Return by method, and then by the title of each of its points, the function that measures the point."""
    curves: dict[str, dict[str, Callable[[], Measures]]] = {
        "re-ranking": {
            f"{multiplier:g} nats": (lambda multiplier=multiplier: world.measure_reranked(multiplier))
            for multiplier in MULTIPLIERS
        }
    }
    for effort, steps in world.steps.items():
        points: dict[str, Callable[[], Measures]] = {"start": lambda: world.measure_reranked(0.0)}
        for rate in rates:
            points[f"lr {rate:g}"] = lambda rate=rate, steps=steps: world.measure_finetuned(rate, steps)
        curves[f"finetuning, as much {effort}"] = points
    return curves | {"RL": {"the run's": world.measure_trained}}


class _RunWorld:
    """The roles of a run in this process, at the checkpoint from which its RL stage started.

    Attributes:
        start: Checkpoint before the RL stage.
        end: Checkpoint at the end of the RL stage.
        width: Length of a list.
        weights: Weight of each reward.
        rewards: Reward workers by name.
        users: User rows of the held-out prompts; `positions` are their positions.
        parts: Mask of the prompts of each part: "choose" and "report".
        control: Setup of continued finetuning: the stage before RL, on RL's users and targets.
        steps: Number of steps of finetuning that have as many passes over the data, or as much compute, as RL.
    """

    def __init__(self, folder: Path):
        from nonet.controller.record import Checkpoints, RunFolder, make_control_name
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import list_reward_options, read_copies
        from nonet.workers.roles import RewardWorker

        run = RunFolder(folder.absolute())
        scenario, _ = load_scenario(run.scenario)
        files, artifacts = read_copies(run), run.find_artifacts()
        stage_names, checkpoints = list(scenario.stages), Checkpoints(run.checkpoints)
        previous_stage = stage_names[stage_names.index(_STAGE) - 1]
        self.start = checkpoints.find_stage_end(previous_stage)
        self.end = checkpoints.find_stage_end(_STAGE)
        self.roles = SmallWorld(run.scenario, artifacts, [], self.start)
        self.trainer, self.rollout, rl = self.roles.trainer, self.roles.rollout, self.roles.stages[_STAGE]
        self.width = scenario.stages[_STAGE].kind.get_width(scenario.stages[_STAGE])
        self.weights = dict(rl.weights)
        self.rewards: dict[str, Any] = {}
        for stage, name, options in list_reward_options(scenario):
            if stage == _STAGE:
                use = files.make_absolute(options.use or name)
                worker = RewardWorker(name, use, files.folder, options.get_options())
                worker.setup()
                worker.open(artifacts)
                self.rewards[name] = worker
        self.users, self.positions = self.rollout.draw_held_out_prompts()
        third = np.array([hash_words(11, int(user)) % 3 for user in self.users])
        self.parts = {"choose": third == 0, "report": third != 0}
        supervised = self.roles.stages[previous_stage]
        users = min(max(supervised.users, rl.users), len(self.trainer.corpus.seq))
        frozen = rl.sparse_lr is None
        self.control = replace(supervised, users=users, target=None, rl_targets=True, frozen_rows=frozen)
        passes = max(1, round(rl.steps * rl.users / users))
        self.steps = {
            "passes": passes,
            "compute": max(passes, _read_last_step(run.metrics, make_control_name(_STAGE))),
        }
        self._version = 0
        self._candidates: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None

    def _load(self, folder: Path) -> None:
        """Load a checkpoint into the roles and publish its weights to the rollout."""
        self.trainer.load(str(folder), None)
        self.roles.shard.load(str(folder))
        self._publish()

    def _publish(self) -> None:
        """Publish the trainer's weights to the rollout as a new version."""
        self._version += 1
        self.rollout.apply(self._version)

    def _generate_beams(self, width: int, *, blind: bool) -> dict[str, Any]:
        """Generate beams of all held-out prompts; `blind` is that of RolloutRequest."""
        from nonet.workers.roles import RolloutRequest

        request = RolloutRequest(_STAGE, 0, width, self._version, chunk=64, blind=blind)
        return self.rollout.generate(self.users, self.positions, request)

    def _measure(self, lists: Mapping[str, Any]) -> Measures:
        """Return the trained reward and NDCG@10 of lists for both parts of the users."""
        from nonet.models.ranking import compute_per_event

        total = np.zeros(len(self.users))
        for name, reward in self.rewards.items():
            total = total + self.weights[name] * np.asarray(reward.score(lists), np.float64).mean(1)
        ndcg = compute_per_event("ndcg@10", self.rollout.find_target_ranks(lists))
        return {
            part: (float(total[rows].mean()), float(ndcg[rows].mean())) for part, rows in self.parts.items()
        }

    def measure_reranked(self, multiplier: float) -> Measures:
        """Measure the lists of the start, re-ranked by the rewards with a multiplier in nats."""
        if self._candidates is None:
            self._load(self.start)
            beams = self._generate_beams(_CANDIDATES_PER_ITEM * self.width, blind=True)
            scores = {name: np.array(reward.score(beams)) for name, reward in self.rewards.items()}
            self._candidates = beams, scores
        weights = {name: np.full(len(self.users), self.weights[name]) for name in self.rewards}
        return self._measure(
            self.rollout.rerank(*self._candidates, weights, multiplier=multiplier, width=self.width)
        )

    def measure_finetuned(self, rate: float, steps: int) -> Measures:
        """Measure the lists after finetuning is continued for `steps` steps at a learning rate."""
        lr = self.control.lr.model_copy(update={"peak": rate})
        setup = replace(self.control, name=f"continued-{steps}", steps=steps, lr=lr, epochs=1.0)
        self._load(self.start)
        self.trainer.begin(setup)
        self.trainer.train(setup, 0, steps)
        self.trainer.fit_memory()
        self._publish()
        return self._measure(self._generate_beams(self.width, blind=False))

    def measure_trained(self) -> Measures:
        """Measure the lists after the run's own RL stage."""
        self._load(self.end)
        return self._measure(self._generate_beams(self.width, blind=False))


def _read_last_step(metrics: Path, stage: str) -> int:
    """Return the last step of a stage in a run's metrics, 0 if the metrics have none."""
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return max((int(record["step"]) for record in records if record["stage"] == stage), default=0)
