"""A small world of 200 items that trains in seconds, in this process, with an exact expected reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ITEMS, USERS, EVENTS = 200, 300, 24
_SCENARIO = """
name: small-world
seed: 5
data:
  interactions: interactions.parquet
  items: items.parquet
  history: 16
  repeats: mask
  split: {use: leave_last_out, test: 1, valid: 1, rl: 4}
tokenizer: {use: rq_kmeans, vectors: [categories, cooccurrence], levels: 2, codes: 12, dim: 16}
model: {use: sid_decoder, width: 32, layers: 1, heads: 2, dropout: 0.0, memory: MEMORY}
sparse: {tables: {item: {dim: 16}, user: {dim: 16}}}
stages:
  pretrain: {epochs: 6, batch: {users: 30}, lr: 3e-3}
  rl: {steps: 1000, users: 32, lr: {peak: 1e-3, warmup: 0.0, decay: none}, rollout: {width: 16}, rewards: {hit: {}}}
"""

# Shapes: U prompts, W beams, I items.


def write_world(folder: Path, memory: str) -> Path:
    """Write tables of users who walk a ring of items, some more popular than others, and a scenario over them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    steps = draw.choice([1, 2, 5, 40], p=[0.5, 0.2, 0.2, 0.1], size=(USERS, EVENTS))
    start = (ITEMS * draw.random(USERS) ** 2).astype(int)
    item = (start[:, None] + steps.cumsum(1)) % ITEMS
    table = {
        "user_id": np.repeat(np.arange(USERS), EVENTS),
        "item_id": item.ravel(),
        "timestamp": np.tile(np.arange(EVENTS) * 3600, USERS),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    kinds = [[f"kind{n // 20}"] for n in range(ITEMS)]
    pq.write_table(pa.table({"item_id": np.arange(ITEMS), "categories": kinds}), folder / "items.parquet")
    (folder / "small.yaml").write_text(_SCENARIO.replace("MEMORY", memory))
    return folder / "small.yaml"


class SmallWorld:
    """Trainer, shard and rollout over the small world, trained here or from a checkpoint.

    The rewards of its prompts are known exactly.
    """

    def __init__(
        self, scenario: Path, artifact_dirs: dict[str, str], changes: list[str], commit: Path | None = None
    ):
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import make_run_setup, make_stage_setups
        from nonet.workers.roles import EmbeddingShard, Rollout, Trainer
        from nonet.workers.runtime import Place

        loaded, _ = load_scenario(scenario, changes)
        run = make_run_setup(loaded)
        self.shard, self.trainer, self.rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
        self.trainer.place = Place(role="trainer", peers={"embedding": self.shard})
        self.rollout.place = Place(role="rollout", peers={"trainer": self.trainer, "embedding": self.shard})
        self.trainer.open(artifact_dirs)
        self.rollout.open(artifact_dirs)
        seq = self.trainer.corpus.seq
        self.stages = make_stage_setups(loaded, len(seq), int(seq.count_events()["train"]))
        self.draw = {"use": loaded.stages["rl"].rollout.use, **loaded.stages["rl"].rollout.get_options()}  # type: ignore[attr-defined]
        self._version = 0
        if commit is None:
            stage = self.stages["pretrain"]
            self.trainer.begin(stage)
            self.trainer.train(stage, 0, stage.steps)
            self.trainer.fit_memory()
        else:
            self.trainer.load(str(commit))
            self.shard.load(str(commit))
        self.trainer.begin(self.stages["rl"])

    def save(self, folder: Path) -> Path:
        """Save a checkpoint of trainer and shard."""
        self.trainer.save(str(folder))
        self.shard.save(str(folder))
        return folder

    @property
    def model(self) -> Any:
        """The dense model in eval mode."""
        return self.trainer.model.eval()

    def lease_prompts(self, max_prompts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return RL prompts, the same at every call."""
        return self.rollout.lease("rl", 0, max_prompts)

    def compute_expected_reward(self, users: np.ndarray, positions: np.ndarray, reward_UI: Tensor) -> Tensor:
        """Return the exact expected reward [U], differentiable in the dense model."""
        from nonet.bench.rl.exact import compute_expected_reward

        recommender = self.rollout._recommender
        cache = recommender.prefill(recommender.batch(users, positions))
        allowed = torch.from_numpy(self.compute_allowed(users, positions))
        trie = recommender.corpus.trie
        return compute_expected_reward(
            self.model, cache, trie, recommender.compute_votes(users, positions), reward_UI, allowed
        )

    def compute_log_probs(self, users: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return the log-probability [U, I] of every item, differentiable."""
        from nonet.models.generation import compute_policy_log_prob

        recommender = self.rollout._recommender
        cache = recommender.prefill(recommender.batch(users, positions))
        sids = torch.from_numpy(recommender.corpus.sids).long().expand(len(users), -1, -1).contiguous()
        votes = recommender.compute_votes(users, positions)
        return compute_policy_log_prob(self.model, cache, sids, recommender.corpus.trie, votes).sum(-1)

    def compute_allowed(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return which items are not masked [U, I] bool."""
        from nonet.samples.batches import gather_masked_items

        hidden = gather_masked_items(self.trainer.corpus.seq, users, positions)
        out = np.ones((len(users), len(self.trainer.corpus.sids)), bool)
        for user in range(len(users)):
            out[user, hidden[user]] = False
        return out

    def compute_rewards(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return hit + 0.2 x novelty of every item [U, I]: 1 for the user's next item, more for rare items."""
        from nonet.samples.batches import locate_events
        from nonet.samples.sequences import TRAIN

        seq = self.trainer.corpus.seq
        events = np.bincount(seq.item[seq.split == TRAIN], minlength=len(self.trainer.corpus.sids))
        reward = np.repeat(0.2 * 30 / (30 + events)[None], len(users), 0)
        reward[np.arange(len(users)), seq.item[locate_events(seq, users, positions)]] += 1
        return reward

    def generate_beams(
        self, users: np.ndarray, positions: np.ndarray, step: int, width: int
    ) -> dict[str, Any]:
        """Return the beams of the rollout."""
        from nonet.workers.roles import RolloutRequest

        self._version += 1
        self.rollout.apply(self._version)
        how = {"stage": "rl", "step": step, "width": width, "version": self._version}
        return self.rollout.generate(users, positions, RolloutRequest(**how, draw=self.draw))
