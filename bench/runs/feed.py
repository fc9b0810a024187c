"""`nonet bench feed`: whether all roles rank and mask consistently on a feed where users return to items.

Half of the users cycle through four items of their own, half walk a ring without repeats. The roles of a run work in
this process, without Ray; tests use the same `FeedWorld`. About 20 s.
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
_OWN = 4  # items that a user goes round
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
    """Return a row for each policy: recall@10 by exhaustive ranking and by beam, hits of the probe, RL's flat groups."""
    import torch

    torch.set_num_threads(
        1
    )  # as a planned run; threads that wait for a busy core cost a hundred times as much
    rows = []
    for policy in ("by the data", "allow", "mask"):
        changes = [f"seed={seeds[0]}", *([] if policy == "by the data" else [f"data.repeats={policy}"])]
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"data.repeats": policy, **_measure_policy(FeedWorld(Path(folder), changes))})
    apart = max(abs(row["recall@10"] - row["by beam"]) for row in rows)
    return {"rows": rows, "ratio": {"recall@10 exhaustive - beam, at most": apart}}


def _measure_policy(made: FeedWorld) -> dict[str, Any]:
    """Train one feed and return its row."""
    made.train("pretrain")
    repeats = made.facts["data"]["repeats"]
    counter, model = made.evaluator.evaluate_baseline("transition_counter"), made.evaluate()
    hits, prompts = made.count_probe_hits()
    flat, groups = made.reinforce(_RL_STEPS)
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
        from nonet.workers.roles import EmbeddingShard, Rollout, Tokeniser, Trainer
        from nonet.workers.roles.evaluation import Evaluate, Evaluator
        from nonet.workers.runtime import Place

        self.folder = folder
        write_feed(folder)
        self.scenario, beside = load_scenario(folder / "feed.yaml", list(changes))
        self.facts = Tokeniser().prepare(make_data_setup(self.scenario, beside), str(folder))
        folders = {kind: artifact["path"] for kind, artifact in self.facts["artifacts"].items()}
        run, data, ask = make_run_setup(self.scenario), self.facts["data"], self.scenario.evaluate
        self.stages = make_stage_setups(self.scenario, data["users"], data["trained_events"])
        self.shard, self.trainer, self.rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
        self.evaluator = Evaluator(replace(run, target=None), Evaluate(metrics=ask.metrics, width=ask.width))
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
        commit = str(self.folder / "commit")
        self.trainer.save(commit)
        self.shard.save(commit)
        return self.evaluator.evaluate(name, commit)

    def generate_beams(self, users: np.ndarray, positions: np.ndarray, step: int = 0) -> dict[str, Any]:
        """Generate rollouts of the stage rl in wire format."""
        from nonet.controller.stages import Reinforced
        from nonet.workers.roles import RolloutRequest

        body = self.scenario.stages["rl"]
        assert isinstance(body, Reinforced)
        width = body.rollout.get_options()["width"]
        return self.rollout.generate(users, positions, RolloutRequest("rl", step, width, 0))

    def count_probe_hits(self) -> tuple[int, int]:
        """Return the number of probe prompts with the target among their beams, and the number of all."""
        beams = self.generate_beams(*self.rollout.draw_held_out_prompts())
        return int(compute_hits(beams).any(1).sum()), len(beams["uid"])

    def reinforce(self, steps: int) -> tuple[int, int]:
        """Train by RL on `hit` alone. Returns the number of groups without a gradient, and of all groups."""
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
    """Write interactions.parquet and feed.yaml; even users cycle through items of their own, odd ones walk a ring."""
    start = np.random.default_rng(0).integers(0, ITEMS, USERS)[:, None]
    step = np.arange(EVENTS)[None]
    goes_round = (np.arange(USERS) % 2 == 0)[:, None]
    item = (start + np.where(goes_round, 3 * (step % _OWN), step)) % ITEMS
    table = {
        "user_id": np.repeat(np.arange(100, 100 + USERS), EVENTS),
        "item_id": item.ravel() + 1000,
        "timestamp": np.tile(3600 * np.arange(EVENTS), USERS),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    (folder / "feed.yaml").write_text(_SCENARIO, encoding="utf-8")
