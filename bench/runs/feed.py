"""`nonet bench feed`: checks that all roles rank and mask items consistently if users return to items.

Half of the users cycle through four items, and half go through the items in order without repeats. The roles of a run are
objects of this process, without Ray; tests use the same `FeedWorld`. The benchmark takes about 20 s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, ITEMS, EVENTS = 60, 40, 24
_CYCLE = 4  # number of items that a user of the first half cycles through
_RL_STEPS = 10
_SCENARIO = """
name: feed
seed: 5
data:
  interactions: interactions.parquet
  history: 8
  split: {use: leave_last_out, test: 1, valid: 1, rl: 4}
tokenizer: {use: rq_kmeans, vectors: [cooccurrence], levels: 2, codes: 8, dim: 8}
model: {use: sid_decoder, width: 16, layers: 1, heads: 2, dropout: 0.0}
sparse: {tables: {item: {dim: 8}, user: {dim: 8}}}
stages:
  pretrain: {epochs: 12, batch: {users: 10}, lr: 3e-3}
  rl:
    steps: 10
    users: 8
    rollout: {use: beam, width: 10}
    rewards: {hit: {weight: 1.0}}
evaluate: {metrics: [recall@1, recall@10, ndcg@10], width: 20}
"""


def bench_feed(seeds: Sequence[int]) -> dict[str, Any]:
    """Train and evaluate one feed per policy of `data.repeats`.

    Args:
        seeds: The seed of the scenario; only the first is used.

    Returns:
        A row per policy, with recall@10 by exhaustive ranking and by beam search, the hits among the rollouts of held-out
        prompts, and the number of RL groups whose rewards are all equal. The ratio is the largest difference of the recalls.
    """
    import torch

    # As in a planned run. More threads than free cores would make steps a hundred times slower.
    torch.set_num_threads(1)
    rows = []
    for policy in ("by the data", "allow", "mask"):
        changes = [f"seed={seeds[0]}", *([] if policy == "by the data" else [f"data.repeats={policy}"])]
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"data.repeats": policy, **_measure_policy(FeedWorld(Path(folder), changes))})
    largest_difference = max(abs(row["recall@10"] - row["by beam"]) for row in rows)
    return {"rows": rows, "ratio": {"recall@10 exhaustive - beam, at most": largest_difference}}


def _measure_policy(world: FeedWorld) -> dict[str, Any]:
    """Train and evaluate one feed, and return its row."""
    world.train("pretrain")
    repeats = world.facts["data"]["repeats"]
    counter, model = world.evaluator.evaluate_baseline("transition_counter"), world.evaluate()
    hits, prompts = world.count_probe_hits()
    flat, groups = world.reinforce(_RL_STEPS)
    return {
        "is": repeats["policy"],
        "test events that return": repeats["share"]["test"],
        "counter recall@10": counter["detail"]["test"]["exhaustive"]["all"]["recall@10"],
        "recall@10": model["detail"]["test"]["exhaustive"]["all"]["recall@10"],
        "by beam": model["detail"]["test"]["beam"]["all"]["recall@10"],
        "probe prompts with a hit": f"{hits} of {prompts}",
        "flat RL groups": f"{flat} of {groups}",
    }


class FeedWorld:
    """Data, trainer, shard, rollout and evaluator of a small run in this process.

    Args:
        folder: Folder of all files.
        changes: Changes of the scenario, as `--set` takes them.
    """

    def __init__(self, folder: Path, changes: Sequence[str] = ()):
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import make_data_setup, make_run_setup, make_stage_setups
        from nonet.workers.roles import EmbeddingShard, Rollout, Trainer
        from nonet.workers.roles.artifacts import Tokeniser
        from nonet.workers.roles.evaluation import Evaluate, Evaluator
        from nonet.workers.runtime import Place

        self.folder = folder
        write_feed(folder)
        self.scenario, scenario_dir = load_scenario(folder / "feed.yaml", list(changes))
        self.facts = Tokeniser().prepare(make_data_setup(self.scenario, scenario_dir), str(folder))
        folders = {kind: artifact["path"] for kind, artifact in self.facts["artifacts"].items()}
        run, data, options = make_run_setup(self.scenario), self.facts["data"], self.scenario.evaluate
        self.stages = make_stage_setups(self.scenario, data["users"], data["trained_events"])
        self.shard, self.trainer, self.rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
        self.evaluator = Evaluator(
            replace(run, target=None), Evaluate(metrics=options.metrics, width=options.width)
        )
        self.trainer.place = Place(role="trainer", peers={"embedding": self.shard})
        self.rollout.place = Place(role="rollout", peers={"trainer": self.trainer, "embedding": self.shard})
        self.trainer.open(folders)
        self.rollout.open(folders)
        self.rollout.apply(0)
        self.evaluator.open(folders, str(folder / "results"))

    def train(self, name: str) -> None:
        """Train a whole supervised stage."""
        stage = self.stages[name]
        self.trainer.begin(stage)
        self.trainer.train(stage, 0, stage.steps)

    def evaluate(self, name: str = "model") -> dict[str, Any]:
        """Evaluate the current model."""
        checkpoint = str(self.folder / "commit")
        self.trainer.save(checkpoint)
        self.shard.save(checkpoint)
        return self.evaluator.evaluate(name, checkpoint)

    def generate_beams(self, users: np.ndarray, positions: np.ndarray, step: int = 0) -> dict[str, Any]:
        """Generate rollouts of the stage `rl` in wire format."""
        from nonet.controller.stages import Reinforced
        from nonet.workers.roles import RolloutRequest

        stage = self.scenario.stages["rl"]
        assert isinstance(stage, Reinforced)
        width = stage.rollout.get_options()["width"]
        return self.rollout.generate(users, positions, RolloutRequest("rl", step, width, 0))

    def count_probe_hits(self) -> tuple[int, int]:
        """Return the number of held-out prompts whose beams contain the target, and the number of held-out prompts."""
        beams = self.generate_beams(*self.rollout.draw_held_out_prompts())
        return int(compute_hits(beams).any(1).sum()), len(beams["uid"])

    def reinforce(self, steps: int) -> tuple[int, int]:
        """Train by RL with the reward `hit`, and return the number of groups without a gradient and of all groups."""
        from nonet.workers.roles import UpdateRequest

        stage, flat, groups = self.stages["rl"], 0, 0
        self.trainer.begin(stage)
        for step in range(steps):
            beams = self.generate_beams(*self.rollout.lease("rl", step, stage.users), step)
            record = self.trainer.update(UpdateRequest(stage, step), beams, {"hit": compute_hits(beams)})
            flat, groups = flat + int(record["flat_groups"]), groups + int(record["prompts"])
        return flat, groups


def compute_hits(beams: dict[str, Any]) -> np.ndarray:
    """Return the reward `hit` [U, W] of rollouts in wire format."""
    from nonet.rl import from_wire
    from nonet.rl.rewards import hit

    answer = from_wire({name: part for name, part in beams.items() if name not in ("user", "position")})
    return hit(answer.item_id, answer.target, answer.valid)


def write_feed(folder: Path) -> None:
    """Write interactions.parquet and feed.yaml; users with an even number cycle through four items, others do not repeat."""
    start = np.random.default_rng(0).integers(0, ITEMS, USERS)[:, None]
    step = np.arange(EVENTS)[None]
    is_cycling = (np.arange(USERS) % 2 == 0)[:, None]
    item = (start + np.where(is_cycling, 3 * (step % _CYCLE), step)) % ITEMS
    table = {
        "user_id": np.repeat(np.arange(100, 100 + USERS), EVENTS),
        "item_id": item.ravel() + 1000,
        "timestamp": np.tile(3600 * np.arange(EVENTS), USERS),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    (folder / "feed.yaml").write_text(_SCENARIO, encoding="utf-8")
