"""What RL has to beat, from finished runs: finetuning continued at several rates, and re-ranking by the same rewards.

Everything starts from the checkpoint that RL began with and is looked at on the lists of users whom RL never trains on. A hash
splits these users: one third chooses a rate or a multiplier, by the highest trained reward that keeps 98 % of NDCG@10, and two
thirds report. RL itself is read from the run. The rewards must be functions or classes of this machine.
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

RATES = (1e-5, 3e-5, 1e-4, 3e-4)
MULTIPLIERS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
_LEAST = 0.98
_CANDIDATES = 4
_STAGE = "rl"

Found = dict[
    str, tuple[float, float]
]  # trained reward and NDCG@10 of the users that choose, and of those that report


def bench_fairness(*, runs: str = "", rates: str = "") -> dict[str, Any]:
    """Compare RL with its controls and with re-ranking.

    Args:
        runs: A run's folder, or a folder of runs `seed-*` as `nonet run --seeds` makes it.
        rates: Learning rates of the controls, such as "1e-5,3e-5".

    Returns:
        A row for each run, method and point: trained reward and NDCG@10 of the users that report, as multiples of the start's,
        and whether the other users chose it. As ratios the medians over runs of what was chosen.

    Raises:
        ConfigError: No runs are named.
    """
    import torch

    if not runs:
        raise ConfigError(
            "fairness compares finished runs: --set runs=FOLDER, of a run or of `nonet run --seeds`"
        )
    torch.set_num_threads(1)
    top = Path(runs)
    folders = [top] if (top / "scenario.yaml").exists() else sorted(top.glob("seed-*"))
    tried = [float(rate) for rate in rates.split(",")] if rates else list(RATES)
    rows = [row for folder in folders for row in _measure_run(folder, tried)]
    ratio = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method and row["chosen"]]
        for name in ("reward", "ndcg@10"):
            ratio[f"{method}: {name} over the start's, median of {len(own)}"] = float(
                np.median([row[name] for row in own])
            )
    return {"rows": rows, "ratio": ratio}


def _measure_run(folder: Path, rates: list[float]) -> list[dict[str, Any]]:
    """Return the rows of one run: the curve of each method, and which point of it was chosen."""
    world, rows = _RunWorld(folder), []
    start = world.measure_reranked(0.0)
    for method, points in _make_curves(world, rates).items():
        found = [(title, look()) for title, look in points.items()]
        allowed = [each for each in found if each[1]["choose"][1] >= _LEAST * start["choose"][1]] or found[:1]
        best = max(allowed, key=lambda each: each[1]["choose"][0])[0]
        for title, each in found:
            reward, ndcg = (round(each["report"][place] / start["report"][place], 4) for place in (0, 1))
            rows.append(
                {
                    "run": folder.name,
                    "method": method,
                    "point": title,
                    "reward": reward,
                    "ndcg@10": ndcg,
                    "chosen": title == best,
                }
            )
    return rows


def _make_curves(world: _RunWorld, rates: list[float]) -> dict[str, dict[str, Callable[[], Found]]]:
    """Return by method its points: a title, and what looks at it."""
    curves: dict[str, dict[str, Callable[[], Found]]] = {
        "re-ranking": {
            f"{each:g} nats": (lambda each=each: world.measure_reranked(each)) for each in MULTIPLIERS
        }
    }
    for measure, steps in world.steps.items():
        points: dict[str, Callable[[], Found]] = {"start": lambda: world.measure_reranked(0.0)}
        for rate in rates:
            points[f"lr {rate:g}"] = lambda rate=rate, steps=steps: world.measure_finetuned(rate, steps)
        curves[f"finetuning, as much {measure}"] = points
    return curves | {"RL": {"the run's": world.measure_trained}}


class _RunWorld:
    """The roles of a run in this process, at the checkpoint that its RL stage began from."""

    def __init__(self, folder: Path):
        from nonet.controller.record import Checkpoints, RunFolder, make_control_name
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import list_reward_options, read_copies
        from nonet.workers.roles import RewardWorker

        run = RunFolder(folder.absolute())
        scenario, _ = load_scenario(run.scenario)
        files, artifacts = read_copies(run), run.find_artifacts()
        names, ends = list(scenario.stages), Checkpoints(run.checkpoints)
        before = names[names.index(_STAGE) - 1]
        self.start, self.end = ends.find_stage_end(before), ends.find_stage_end(_STAGE)
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
        supervised = self.roles.stages[before]
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
        self.trainer.load(str(folder), None)
        self.roles.shard.load(str(folder))
        self._publish()

    def _publish(self) -> None:
        self._version += 1
        self.rollout.apply(self._version)

    def _generate_beams(self, width: int, *, blind: bool) -> dict[str, Any]:
        from nonet.workers.roles import RolloutRequest

        request = RolloutRequest(_STAGE, 0, width, self._version, chunk=64, blind=blind)
        return self.rollout.generate(self.users, self.positions, request)

    def _measure(self, lists: Mapping[str, Any]) -> Found:
        """Return trained reward and NDCG@10 of lists, of both parts of the users."""
        from nonet.models.ranking import compute_per_event

        total = np.zeros(len(self.users))
        for name, reward in self.rewards.items():
            total = total + self.weights[name] * np.asarray(reward.score(lists), np.float64).mean(1)
        ndcg = compute_per_event("ndcg@10", self.rollout.find_target_ranks(lists))
        return {
            part: (float(total[rows].mean()), float(ndcg[rows].mean())) for part, rows in self.parts.items()
        }

    def measure_reranked(self, multiplier: float) -> Found:
        """Return what the start's lists come to, re-ranked by the rewards with a multiplier in nats."""
        if self._candidates is None:
            self._load(self.start)
            beams = self._generate_beams(_CANDIDATES * self.width, blind=True)
            self._candidates = beams, {name: np.array(r.score(beams)) for name, r in self.rewards.items()}
        weights = {name: np.full(len(self.users), self.weights[name]) for name in self.rewards}
        return self._measure(
            self.rollout.rerank(*self._candidates, weights, multiplier=multiplier, width=self.width)
        )

    def measure_finetuned(self, rate: float, steps: int) -> Found:
        """Return what lists come to after finetuning was continued for so many steps at a rate."""
        lr = self.control.lr.model_copy(update={"peak": rate})
        setup = replace(self.control, name=f"continued-{steps}", steps=steps, lr=lr, epochs=1.0)
        self._load(self.start)
        self.trainer.begin(setup)
        self.trainer.train(setup, 0, steps)
        self.trainer.fit_memory()
        self._publish()
        return self._measure(self._generate_beams(self.width, blind=False))

    def measure_trained(self) -> Found:
        """Return what the lists of the run's own RL come to."""
        self._load(self.end)
        return self._measure(self._generate_beams(self.width, blind=False))


def _read_last_step(metrics: Path, stage: str) -> int:
    """Return the last step that a run's metrics have of a stage, 0 for none."""
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return max((int(record["step"]) for record in records if record["stage"] == stage), default=0)
