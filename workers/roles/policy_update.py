"""PolicyUpdate: an RL step of one trainer, from beams and scores to a dense step and its record.

Every rank works on its share of the prompts, a bounded chunk at a time; losses are divided by the global count of codes. The
sparse rows are frozen: the KL then measures the dense policy alone, against a reference that reads the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.training import ShardedTables
from nonet.models.generation import Corpus, Voters, on, policy_log_prob
from nonet.plugins import heavy
from nonet.rl import Advantages, PolicyLoss
from nonet.rl.algorithms import ALGORITHMS, Algorithm, Policy
from nonet.samples.batches import bounded, prompt_batch
from nonet.types import SampleBatch
from nonet.workers import Share, SparseBatch
from nonet.workers.engines import EngineRuntime
from nonet.workers.roles.settings import LearningRate, RunSetup, StageSetup
from nonet.workers.runtime import Membership, cut

# Shapes: U prompts, W beams, L levels, M unique keys, D width.


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What an RL step works on; `reference`: the stage's first weights, None where its algorithm needs none; `voters`: of the
    model's memory, None without one."""

    run: RunSetup
    stage: StageSetup
    corpus: Corpus
    dense: EngineRuntime
    sparse: ShardedTables
    member: Membership
    reference: Any
    voters: Voters | None
    device: str

    @property
    def model(self) -> Any:
        """What losses are computed with."""
        return self.dense.model

    def step(self, step: int, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Gradients of this rank's share, a dense step with those of all, and its record (`Trainer.update`)."""
        began = time.perf_counter()
        self.model.eval()
        advantage, valid_UW = self._advantages(beams, scores)
        count = max(self.member.total(float(valid_UW.sum() * beams["sid"].shape[-1]))[0], 1.0)
        sums = self._gradients(beams, advantage, count)
        flat = advantage.small_groups + advantage.flat_groups
        rewards = _sums(beams["valid"], scores)
        totals = self.member.total(*sums, float(flat), float(len(valid_UW)), *rewards)
        lr = LearningRate(**self.stage.lr).at(step, self.stage.steps)
        norm = self.dense.clip()
        self.dense.step(lr)
        self.sparse.stop()
        record = self._record(count, totals, list(scores))
        return record | {"lr": lr, "norm": norm, "seconds": time.perf_counter() - began}

    def _gradients(self, beams: Mapping[str, Any], advantage: Advantages, count: float) -> list[float]:
        """Gradients of the loss, a chunk of prompts at a time; sums of loss, kl, clipped and ratio over this rank's codes."""
        parts = bounded(np.ones(len(beams["valid"]), np.int64), self.stage.chunk)
        share = Share(
            [self._prompts(cut(beams, p.start, p.stop)) for p in parts], self.run.features, self.device
        )
        rows = share.frozen_rows(self.sparse)
        sums = [0.0] * 4
        for part, chunk in zip(parts, share, strict=True):
            policy = self._loss(chunk, rows, cut(beams, part.start, part.stop), advantage.value[part])
            self.dense.backward(policy.loss / count)
            each = policy.loss.detach(), policy.kl, policy.clipped, policy.ratio
            sums = [total + float(value) for total, value in zip(sums, each, strict=True)]
        return sums

    def _record(self, count: float, totals: Sequence[float], rewards: Sequence[str]) -> dict[str, float]:
        """A step's means over all ranks: of losses a code, of rewards a beam."""
        loss, kl, clipped, ratio = (total / count for total in totals[:4])
        flat_groups, prompts = totals[4:6]
        record = {
            "loss": loss,
            "kl": kl,
            "clipped": clipped,
            "ratio": ratio,
            "flat_groups": flat_groups,
            "prompts": prompts,
        }
        means = {name: total / max(1.0, prompts) for name, total in zip(rewards, totals[6:], strict=True)}
        record |= {f"reward.{name}": mean for name, mean in means.items()}
        record["reward"] = sum(self.stage.weights[name] * mean for name, mean in means.items())
        return record

    def _advantages(
        self, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> tuple[Advantages, Tensor]:
        """Advantages of this rank's whole share, and which of its beams are valid [U, W]."""
        valid_UW = torch.from_numpy(np.ascontiguousarray(beams["valid"]))
        rewards = {name: torch.from_numpy(np.ascontiguousarray(score)) for name, score in scores.items()}
        compute = heavy(
            _algorithm(self.stage).advantage
        )  # small, in float64: on the host, whatever the device
        return compute(rewards, self.stage.weights, valid_UW, self.stage.algorithm, self._sum), valid_UW

    def _prompts(self, beams: Mapping[str, Any]) -> Callable[[], SampleBatch]:
        """How the prompts that these beams answer are made a batch."""
        return partial(
            prompt_batch,
            self.corpus.seq,
            self.corpus.sids,
            beams["user"],
            beams["position"],
            history=self.run.history,
            stage=self.stage.name,
        )

    def _loss(
        self,
        chunk: SparseBatch,
        rows: Mapping[str, Tensor],
        beams: Mapping[str, Any],
        advantage_UW: Tensor,
    ) -> PolicyLoss:
        """The algorithm's loss of a chunk's beams with their advantages; `rows` are those of its tables."""
        sid_UWL, valid_UW, old_UWL = (
            torch.from_numpy(np.ascontiguousarray(beams[name])).to(self.device)
            for name in ("sid", "valid", "logp")
        )
        batch, spread, reference_UWL = on(chunk.batch, self.device), chunk.spread(rows), None
        votes = self.voters and self.voters.votes(self.corpus.seq, beams["user"], beams["position"])
        asked = batch, spread, sid_UWL, self.corpus.trie, votes and votes.to(self.device)
        if self.reference is not None:
            with torch.no_grad():
                reference_UWL = policy_log_prob(self.reference, *asked)
        logp_UWL = policy_log_prob(self.model, *asked)
        policy = Policy(logp_UWL, old_UWL, advantage_UW.to(self.device), valid_UW, reference_UWL)
        return heavy(_algorithm(self.stage).loss)(policy, self.stage.algorithm)

    def _sum(self, moments: Tensor) -> Tensor:
        return torch.tensor(self.member.total(*moments.tolist()), dtype=moments.dtype)


def needs_reference(stage: StageSetup) -> bool:
    """Whether a stage compares its weights with its first ones."""
    return bool(stage.algorithm) and _algorithm(stage).needs_reference(stage.algorithm)


def _algorithm(stage: StageSetup) -> Algorithm:
    return ALGORITHMS.get(stage.algorithm["use"])


def _sums(valid_UW: np.ndarray, scores: Mapping[str, np.ndarray]) -> list[float]:
    """Each reward's mean score a beam, summed over prompts."""
    return [
        float(np.mean(np.where(valid_UW, score, 0))) * len(score) if len(score) else 0.0
        for score in scores.values()
    ]
