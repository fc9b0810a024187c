"""PolicyUpdate: an RL step of one trainer, from beams and scores to optimizer steps and the record of the step.

Every rank works on its share of the prompts, in chunks of bounded size; losses are divided by the number of codes on all ranks. A
rollout is used for `epochs` passes of `minibatches` optimizer steps each. Sparse rows are frozen unless the stage has a
`sparse_lr`. Then the rows that a step is about to change are stored in the reference and in older versions of the policy, so that
a KL term compares complete policies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import compute_policy_log_prob, move_batch
from nonet.plugins import load_heavy
from nonet.random import rng
from nonet.rl import (
    Advantages,
    Critic,
    PolicyLoss,
    compute_corrections,
    should_skip_step,
    summarise_mismatch,
)
from nonet.rl.algorithms import Algorithm, LossInputs
from nonet.samples.batches import split_by_size
from nonet.workers import FrozenPolicy, SparseBatch, StepShare
from nonet.workers.engines import are_all_finite, list_gradients, poison, skip_step
from nonet.workers.roles import LearnerContext, StageSetup
from nonet.workers.roles.learners.policy_advantages import PolicyAdvantages, drop_unscored, select_advantages
from nonet.workers.roles.learners.policy_metrics import PolicyMetrics, sum_scores
from nonet.workers.roles.learners.policy_prompts import PolicyPrompts, restore_policy_rows, select_rows

# Shapes: U prompts, W beams, L levels, M unique keys, D width.

_READ = ("user", "position", "item", "sid", "valid", "logp", "weight", "chance", "weights_version", "scene")


@dataclass(frozen=True)
class PolicyUpdate:
    """One RL step of a trainer.

    Attributes:
        context: Objects shared with the trainer.
        stage: The stage, with the weights of rewards at this step.
        algorithm: The algorithm of the stage.
        reference: The policy that a KL term compares with; None where the algorithm needs none.
        critic: The value head of algorithms that have one.
        versions: Published policies by version, if `mismatch` is measured. The newest is the live policy.
    """

    context: LearnerContext
    stage: StageSetup
    algorithm: Algorithm
    reference: FrozenPolicy | None
    critic: Critic | None
    versions: Mapping[int, FrozenPolicy]

    @property
    def _prompts(self) -> PolicyPrompts:
        return PolicyPrompts(self.context, self.stage)

    @property
    def _advantages(self) -> PolicyAdvantages:
        return PolicyAdvantages(self.context, self.stage, self.algorithm, self._prompts)

    @property
    def _metrics(self) -> PolicyMetrics:
        return PolicyMetrics(self.context, self.stage, self.algorithm, self.reference, self._prompts)

    def step(self, step: int, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Take the optimizer steps of an RL step and return its record (`Trainer.update`)."""
        began = time.perf_counter()
        self.context.model.eval()
        beams = {name: np.ascontiguousarray(beams[name]) for name in _READ if name in beams}
        beams["valid"], scores, scored = drop_unscored(beams["valid"], scores)
        apart, weight = self._measure_mismatch(beams) if self.stage.mismatch else ({}, None)
        advantage, valid_UW = self._advantages.compute(beams, scores, weight)
        watched = self._metrics.measure_exactly(beams)
        lr = self.stage.lr.compute_rate(step, self.stage.steps)
        norm, totals, counts, skipped = 0.0, None, 0.0, 0
        held = bool(apart) and should_skip_step(apart, self.stage.mismatch)
        if self.critic is not None and self._count_passes() > 1 and not held:
            beams["value"] = self._compute_values(beams)
        for part in self._draw_minibatches(step, len(valid_UW)) if not held else ():
            count, sums = self._accumulate_minibatch(
                step, select_rows(beams, part), select_advantages(advantage, part), valid_UW[part]
            )
            norm = self._take_optimizer_step(lr)
            skipped += not math.isfinite(norm)
            counts, totals = counts + count, sums if totals is None else totals + sums
        self._update_reference()
        self.context.sparse.stop()
        if totals is None:
            totals, counts = torch.zeros(4 + len(self.algorithm.more), dtype=torch.float64), 1.0
        flat = float(advantage.small_groups + advantage.flat_groups)
        missed = float((~self._prompts.find_hits(beams)).all(1).sum())
        all_prompts = float(len(valid_UW))
        facts = self.context.member.sum_over_trainers(
            flat, missed, scored, *watched, *sum_scores(beams["valid"], scores), all_prompts
        )
        record = self._metrics.make_record(
            self.context.member.sum_over_trainers(*totals.tolist()), counts, facts, list(scores)
        )
        apart |= {"mismatch/stopped": float(held)} if apart else {}
        record |= (
            self._metrics.measure_scenes(beams, scores, record) | self._metrics.measure_breadth(beams) | apart
        )
        record |= {"skipped": float(skipped)} if skipped else {}
        norm = norm if math.isfinite(norm) else 0.0
        return record | {"lr": lr, "norm": norm, "seconds": time.perf_counter() - began}

    def _measure_mismatch(self, beams: dict[str, Any]) -> tuple[dict[str, float], Tensor | None]:
        """Measure the difference between rollout and trainer under the same weights.

        Replaces `logp` of the beams by the trainer's log-probabilities.

        Returns:
            The metrics, and the correction weight of each beam or level; None without correction.
        """
        rollout_UWL, options = beams["logp"], self.stage.mismatch
        beams["logp"] = self._recompute_log_prob(beams)
        arguments = (
            torch.from_numpy(beams["logp"]),
            torch.from_numpy(rollout_UWL),
            torch.from_numpy(beams["valid"]),
        )
        corrections = compute_corrections(*arguments, options["correct"], options["cap"])
        return summarise_mismatch(
            self.context.member.sum_over_trainers(*corrections.sums.tolist()), rollout_UWL.shape[-1]
        ), corrections.weight_UW

    def _count_passes(self) -> int:
        """Return the number of optimizer steps per rollout."""
        options = self.stage.algorithm
        return int(options.get("epochs", 1)) * int(options.get("minibatches", 1))

    @torch.no_grad()
    def _compute_values(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Compute the critic's values [U, W, L] of the beams before the first pass over this rollout."""
        assert self.critic is not None
        out = np.zeros(beams["logp"].shape, np.float32)
        parts = split_by_size(np.ones(len(out), np.int64), self.stage.chunk)
        share = self._prompts.make_share(beams, parts)
        rows = share.pull_frozen_rows(self.context.sparse)
        for part, chunk in zip(parts, share, strict=True):
            cache = self.context.model.prefill(
                move_batch(chunk.batch, self.context.device), chunk.spread(rows)
            )
            sid_UWL = torch.from_numpy(np.ascontiguousarray(beams["sid"][part])).to(self.context.device)
            out[part] = self.critic.values(cache.state, sid_UWL).cpu().numpy()
        return out

    @torch.no_grad()
    def _recompute_log_prob(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Compute the trainer's log-probabilities [U, W, L] of the beams under the weights that generated them."""
        out = np.zeros_like(beams["logp"])
        made = beams.get("weights_version", np.full(len(out), -1))
        parts = [
            np.flatnonzero(made == version)[part]
            for version in np.unique(made)
            for part in split_by_size(np.ones(int((made == version).sum()), np.int64), self.stage.chunk)
        ]
        share = self._prompts.make_share(beams, parts)
        rows = share.pull_frozen_rows(self.context.sparse)
        for part, chunk in zip(parts, share, strict=True):
            some, batch = select_rows(beams, part), move_batch(chunk.batch, self.context.device)
            version = self.versions.get(int(made[part[0]])) if len(part) else None
            model = self.context.model if version is None else version.model
            sid_UWL = torch.from_numpy(some["sid"]).to(self.context.device)
            cache = model.prefill(batch, chunk.spread(restore_policy_rows(version, share.keys, rows)))
            votes = self._prompts.compute_votes(some, version)
            out[part] = (
                compute_policy_log_prob(model, cache, sid_UWL, self.context.corpus.trie, votes).cpu().numpy()
            )
        return out

    def _draw_minibatches(self, step: int, prompts: int) -> Iterator[np.ndarray]:
        """Yield the indices of this rank's prompts per mini-batch, shuffled if a pass has several."""
        options = self.stage.algorithm
        parts = int(options.get("minibatches", 1))
        for epoch in range(int(options.get("epochs", 1))):
            order = np.arange(prompts)
            if parts > 1:
                words = self.stage.name, step, epoch, self.context.member.rank, "minibatches"
                order = rng(self.context.run.seed, *words).permutation(prompts)
            yield from np.array_split(order, parts)

    def _accumulate_minibatch(
        self, step: int, beams: Mapping[str, Any], advantage: Advantages, valid_UW: Tensor
    ) -> tuple[float, Tensor]:
        """Compute the gradients of one mini-batch, and return the count of all ranks and the sums over this rank's codes."""
        used_UW = valid_UW if advantage.used_U is None else valid_UW & advantage.used_U[:, None]
        count = self.algorithm.counted(used_UW, advantage.value, beams["sid"].shape[-1])
        count = max(self.context.member.sum_over_trainers(count)[0], 1.0)
        return count, self._compute_gradients(step, beams, advantage, used_UW, count)

    def _take_optimizer_step(self, lr: float) -> float:
        """Take one step of the dense optimizer and of the critic, and return the gradient's norm.

        A norm that is not finite skips the step.
        """
        with self.context.meter.time_section("communication"):
            norm = self.context.dense.clip()
        if not math.isfinite(norm):
            skip_step(self.context.dense)
            if self.critic is not None:
                self.critic.skip()
            return norm
        with self.context.meter.time_section("optimizer"):
            self.context.dense.step(lr)
        if self.critic is not None:
            self.critic.step(self._sum_gradient)
        return norm

    def _compute_gradients(
        self, step: int, beams: Mapping[str, Any], advantage: Advantages, valid_UW: Tensor, count: float
    ) -> Tensor:
        """Compute the gradients of the loss, one chunk of prompts at a time.

        Returns:
            Sums over this rank's codes of loss, kl, clipped, ratio and the algorithm's further values.
        """
        parts = split_by_size(np.ones(len(valid_UW), np.int64), self.stage.chunk)
        share = self._prompts.make_share(beams, parts)
        learn = self.stage.sparse_lr is not None
        if learn:
            self._store_rows(share)
        rows = self._pull_trained_rows(share) if learn else share.pull_frozen_rows(self.context.sparse)
        sums = torch.zeros(4 + len(self.algorithm.more), dtype=torch.float64)
        for part, chunk in zip(parts, share, strict=True):
            with self.context.meter.time_section("dense"):
                policy = self._compute_loss(
                    chunk, rows, select_rows(beams, part), select_advantages(advantage, part), valid_UW[part]
                )
                self.context.dense.backward(policy.loss / count)
            each = policy.loss.detach(), policy.kl, policy.clipped, policy.ratio
            more = [policy.more[name] for name in self.algorithm.more]
            sums += torch.tensor([float(value) for value in (*each, *more)], dtype=torch.float64)
        if learn:
            self._push_rows(step, share, rows)
        return sums

    def _store_rows(self, share: StepShare) -> None:
        """Store the rows that this step is about to change in the reference and in older versions.

        All ranks store the rows that any of them changes, so every rank must call this at the same point of a step.
        """
        policies = [*self.versions.values(), *([] if self.reference is None else [self.reference])]
        if not policies:
            return
        for table, keys in share.keys.items():
            changing = self.context.member.gather_distinct_keys(keys)
            missing = [policy.find_missing_keys(table, changing) for policy in policies]
            some = torch.cat(missing).unique()
            rows = self.context.sparse.pull(table, some, train=False).detach().clone().to(self.context.device)
            for policy in policies:
                policy.store(table, some, rows)

    def _update_reference(self) -> None:
        """Move the reference towards the policy as an exponential moving average, if the algorithm has this option."""
        how = self.stage.algorithm.get("reference")
        if self.reference is None or not isinstance(how, Mapping) or not how.get("ema"):
            return
        self.reference.follow(
            self.context.model,
            how["ema"],
            lambda table, keys: self.context.sparse.pull(table, keys, train=False).detach(),
        )

    def _pull_trained_rows(self, share: StepShare) -> dict[str, Tensor]:
        """Pull the rows [M, D] by table with gradients enabled. Every rank must call this at the same point."""
        rows = {table: self.context.sparse.pull(table, keys) for table, keys in share.keys.items()}
        return {table: row.detach().to(self.context.device).requires_grad_() for table, row in rows.items()}

    def _push_rows(self, step: int, share: StepShare, rows: Mapping[str, Tensor]) -> None:
        """Update the rows with the stage's `sparse_lr`, which follows the schedule of the dense rate."""
        assert self.stage.sparse_lr is not None
        rate = self.stage.lr
        lr = self.stage.sparse_lr * rate.compute_rate(step, self.stage.steps) / rate.peak
        for table, keys in share.keys.items():
            grad = torch.zeros_like(rows[table]) if rows[table].grad is None else rows[table].grad
            assert grad is not None
            if not are_all_finite([grad]):  # Poisoned gradients skip the step on every rank.
                poison(list_gradients(self.context.dense))
                grad = torch.zeros_like(grad)
            self.context.sparse.push(table, keys, grad.cpu(), self.stage.first + step + 1, lr)

    def _compute_loss(
        self,
        chunk: SparseBatch,
        rows: Mapping[str, Tensor],
        beams: Mapping[str, Any],
        advantage: Advantages,
        valid_UW: Tensor,
    ) -> PolicyLoss:
        """Compute the algorithm's loss of a chunk.

        Args:
            chunk: Batch of the chunk's prompts.
            rows: Rows [M, D] of the whole share by table.
            beams: Beams of the chunk.
            advantage: Their advantages.
            valid_UW: Mask of the valid beams.
        """
        sid_UWL, old_UWL = (torch.from_numpy(beams[name]).to(self.context.device) for name in ("sid", "logp"))
        batch, spread, width = (
            move_batch(chunk.batch, self.context.device),
            chunk.spread(rows),
            sid_UWL.shape[1],
        )
        target = self.algorithm.needs_target(self.stage.algorithm)
        if target:
            taken_UL = torch.from_numpy(self._prompts.find_targets(beams)).to(self.context.device)
            sid_UWL = torch.cat([sid_UWL, taken_UL[:, None].to(sid_UWL.dtype)], 1)
        arguments = sid_UWL, self.context.corpus.trie
        both_UWL = None
        if self.reference is not None:
            with torch.no_grad():
                frozen = chunk.spread(restore_policy_rows(self.reference, chunk.keys, rows))
                cache = self.reference.model.prefill(batch, frozen)
                votes = self._prompts.compute_votes(beams, self.reference)
                both_UWL = compute_policy_log_prob(self.reference.model, cache, *arguments, votes)
        cache = self.context.model.prefill(batch, spread)
        logp_UWL = compute_policy_log_prob(
            self.context.model, cache, *arguments, self._prompts.compute_votes(beams)
        )
        policy = LossInputs(
            logp_UWL[:, :width],
            old_UWL,
            advantage.value.to(self.context.device),
            valid_UW.to(self.context.device),
            None if both_UWL is None else both_UWL[:, :width],
            logp_UWL[:, -1] if target else None,
            both_UWL[:, -1] if target and both_UWL is not None else None,
            torch.from_numpy(self._prompts.find_hits(beams)).to(self.context.device) if target else None,
            None if self.critic is None else self.critic.values(cache.state, sid_UWL[:, :width]),
            advantage.group_U,
            self._advantages.compute_draw_weights(beams, valid_UW),
            torch.from_numpy(beams["value"]).to(self.context.device) if "value" in beams else None,
        )
        return load_heavy(self.algorithm.loss)(policy, self.stage.algorithm)

    def _sum_gradient(self, flat: Tensor) -> Tensor:
        """Sum a flat gradient over all ranks in place."""
        if self.context.member.n_trainers > 1:
            torch.distributed.all_reduce(flat, group=self.context.member.trainers)
        return flat
