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
from nonet.workers.engines import are_all_finite, list_gradients, poison, run_backward, skip_step
from nonet.workers.engines.division import iterate_weight_pairs, join_passes
from nonet.workers.roles import LearnerContext, StageSetup
from nonet.workers.roles.learners.policy_advantages import PolicyAdvantages, drop_unscored, select_advantages
from nonet.workers.roles.learners.policy_metrics import PolicyMetrics, sum_scores
from nonet.workers.roles.learners.policy_prompts import PolicyPrompts, restore_policy_rows, select_rows

# Shapes: U prompts, W beams, L levels, M unique keys, D width.

# Fields of the rollouts that a step reads.
_FIELDS = ("user", "position", "item", "sid", "valid", "logp", "weight", "chance", "weights_version", "scene")
_LOSS_SUMS = 4  # Number of sums over codes that every algorithm has: loss, kl, clipped and ratio.


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
        started_at = time.perf_counter()
        self.context.model.eval()
        beams = {name: np.ascontiguousarray(beams[name]) for name in _FIELDS if name in beams}
        beams["valid"], scores, scored_prompts = drop_unscored(beams["valid"], scores)
        mismatch, weight = self._correct_mismatch(beams) if self.stage.mismatch else ({}, None)
        advantage, valid_UW = self._advantages.compute(beams, scores, weight)
        exact_sums = self._metrics.measure_exactly(beams)
        lr = self.stage.lr.compute_rate(step, self.stage.steps)
        norm, totals, code_count, skipped_updates = 0.0, None, 0.0, 0
        is_stopped = bool(mismatch) and should_skip_step(mismatch, self.stage.mismatch)
        if self.critic is not None and self._count_updates() > 1 and not is_stopped:
            beams["value"] = self._compute_values(beams)
        for part in self._draw_minibatches(step, len(valid_UW)) if not is_stopped else ():
            minibatch_codes, sums = self._accumulate_minibatch(
                step, select_rows(beams, part), select_advantages(advantage, part), valid_UW[part]
            )
            norm = self._take_optimizer_step(lr)
            skipped_updates += not math.isfinite(norm)
            code_count, totals = code_count + minibatch_codes, sums if totals is None else totals + sums
        self._update_reference()
        self.context.tables.stop()
        if totals is None:
            totals, code_count = torch.zeros(_LOSS_SUMS + len(self.algorithm.more), dtype=torch.float64), 1.0
        prompt_sums = self.context.member.sum_over_trainers(
            float(advantage.small_groups + advantage.flat_groups),
            float((~self._prompts.find_hits(beams)).all(1).sum()),
            scored_prompts,
            *exact_sums,
            *sum_scores(beams["valid"], scores),
            float(len(valid_UW)),
        )
        record = self._metrics.make_record(
            self.context.member.sum_over_trainers(*totals.tolist()), code_count, prompt_sums, list(scores)
        )
        record |= self._metrics.measure_scenes(beams, scores, record)
        record |= self._metrics.measure_breadth(beams)
        if mismatch:
            record |= mismatch | {"mismatch/stopped": float(is_stopped)}
        record |= {"skipped": float(skipped_updates)} if skipped_updates else {}
        norm = norm if math.isfinite(norm) else 0.0
        return record | {"lr": lr, "norm": norm, "seconds": time.perf_counter() - started_at}

    def _correct_mismatch(self, beams: dict[str, Any]) -> tuple[dict[str, float], Tensor | None]:
        """Replace `logp` of the beams by the trainer's log-probabilities, and measure the difference.

        Both are computed under the weights that generated the beams.

        Returns:
            The metrics, and the correction weight of each beam or level; None without correction.
        """
        rollout_UWL, options = beams["logp"], self.stage.mismatch
        beams["logp"] = self._recompute_log_prob(beams)
        corrections = compute_corrections(
            torch.from_numpy(beams["logp"]),
            torch.from_numpy(rollout_UWL),
            torch.from_numpy(beams["valid"]),
            options["correct"],
            options["cap"],
        )
        sums = self.context.member.sum_over_trainers(*corrections.sums.tolist())
        return summarise_mismatch(sums, rollout_UWL.shape[-1]), corrections.weight_UW

    def _count_updates(self) -> int:
        """Return the number of optimizer steps per rollout."""
        options = self.stage.algorithm
        return int(options.get("epochs", 1)) * int(options.get("minibatches", 1))

    @torch.no_grad()
    def _compute_values(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Compute the critic's values [U, W, L] of the beams before the first pass over this rollout."""
        assert self.critic is not None
        value_UWL = np.zeros(beams["logp"].shape, np.float32)
        parts = split_by_size(np.ones(len(value_UWL), np.int64), self.stage.chunk)
        share = self._prompts.make_share(beams, parts)
        rows = share.pull_frozen_rows(self.context.tables)
        with join_passes(self.context.model):
            for part, chunk in zip(parts, share, strict=True):
                cache = self.context.model.prefill(
                    move_batch(chunk.batch, self.context.device), chunk.spread(rows)
                )
                sid_UWL = torch.from_numpy(np.ascontiguousarray(beams["sid"][part])).to(self.context.device)
                value_UWL[part] = self.critic.values(cache.state, sid_UWL).cpu().numpy()
        return value_UWL

    @torch.no_grad()
    def _recompute_log_prob(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Compute the trainer's log-probabilities [U, W, L] of the beams under the weights that generated them."""
        logp_UWL = np.zeros_like(beams["logp"])
        versions_U = beams.get("weights_version", np.full(len(logp_UWL), -1))
        is_live_U = ~np.isin(versions_U, list(self.versions))
        for version in (None, *sorted(self.versions)):  # The same on all ranks; None is the live policy.
            own = np.flatnonzero(is_live_U if version is None else versions_U == version)
            self._recompute_with_version(
                None if version is None else self.versions[version], beams, own, logp_UWL
            )
        return logp_UWL

    def _recompute_with_version(
        self, policy: FrozenPolicy | None, beams: Mapping[str, Any], own: np.ndarray, logp_UWL: np.ndarray
    ) -> None:
        """Set the log-probabilities of the prompts `own` under a published policy; None is the live policy."""
        parts = [own[part] for part in split_by_size(np.ones(len(own), np.int64), self.stage.chunk)]
        share = self._prompts.make_share(beams, parts)
        rows = share.pull_frozen_rows(self.context.tables)
        model = self.context.model if policy is None else policy.model
        with join_passes(model):
            for part, chunk in zip(parts, share, strict=True):
                if not len(part):
                    continue
                chunk_beams, batch = select_rows(beams, part), move_batch(chunk.batch, self.context.device)
                sid_UWL = torch.from_numpy(chunk_beams["sid"]).to(self.context.device)
                cache = model.prefill(batch, chunk.spread(restore_policy_rows(policy, share.keys, rows)))
                votes = self._prompts.compute_votes(chunk_beams, policy)
                logp_UWL[part] = (
                    compute_policy_log_prob(model, cache, sid_UWL, self.context.corpus.trie, votes)
                    .cpu()
                    .numpy()
                )

    def _draw_minibatches(self, step: int, prompt_count: int) -> Iterator[np.ndarray]:
        """Yield the indices of this rank's prompts per mini-batch, shuffled if a pass has several."""
        options = self.stage.algorithm
        minibatches = int(options.get("minibatches", 1))
        for epoch in range(int(options.get("epochs", 1))):
            order = np.arange(prompt_count)
            if minibatches > 1:
                words = self.stage.name, step, epoch, self.context.member.data_rank, "minibatches"
                order = rng(self.context.run.seed, *words).permutation(prompt_count)
            yield from np.array_split(order, minibatches)

    def _accumulate_minibatch(
        self, step: int, beams: Mapping[str, Any], advantage: Advantages, valid_UW: Tensor
    ) -> tuple[float, Tensor]:
        """Compute the gradients of one mini-batch in chunks of prompts, and update the rows if the stage trains them.

        Returns:
            The number of codes of all ranks, and the sums over this rank's codes of loss, kl, clipped, ratio and the
            algorithm's further values, [4 + n] float64.
        """
        used_UW = valid_UW if advantage.used_U is None else valid_UW & advantage.used_U[:, None]
        count = self.algorithm.counted(used_UW, advantage.value, beams["sid"].shape[-1])
        count = max(self.context.member.sum_over_trainers(count)[0], 1.0)
        parts = split_by_size(np.ones(len(used_UW), np.int64), self.stage.chunk)
        share = self._prompts.make_share(beams, parts)
        trains_rows = self.stage.sparse_lr is not None
        if trains_rows:
            self._store_rows(share)
        rows = self._pull_trained_rows(share) if trains_rows else share.pull_frozen_rows(self.context.tables)
        sums = torch.zeros(_LOSS_SUMS + len(self.algorithm.more), dtype=torch.float64)
        passes = self.context.count_passes(len(share))
        parts += [slice(0, 0)] * (passes - len(parts))
        for index, (part, chunk) in enumerate(zip(parts, share.iterate(passes), strict=True)):
            with self.context.meter.time_section("dense"):
                policy = self._compute_loss(
                    chunk, rows, select_rows(beams, part), select_advantages(advantage, part), used_UW[part]
                )
                run_backward(self.context.dense, policy.loss / count, is_last=index == passes - 1)
            chunk_sums = policy.loss.detach(), policy.kl, policy.clipped, policy.ratio
            more_sums = [policy.more[name] for name in self.algorithm.more]
            sums += torch.tensor([float(value) for value in (*chunk_sums, *more_sums)], dtype=torch.float64)
        if trains_rows:
            self._push_rows(step, share, rows)
        return count, sums

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

    def _store_rows(self, share: StepShare) -> None:
        """Store the rows that this step is about to change in the reference and in older versions.

        All ranks store the rows that any of them changes, so every rank must call this at the same point of a step.
        """
        policies = [*self.versions.values(), *([] if self.reference is None else [self.reference])]
        if not policies:
            return
        for table, keys in share.keys.items():
            changing_keys = self.context.member.gather_distinct_keys(keys)
            missing = [policy.find_missing_keys(table, changing_keys) for policy in policies]
            new_keys = torch.cat(missing).unique()
            rows = self.context.tables.pull(table, new_keys, train=False).detach().clone()
            rows = rows.to(self.context.device)
            for policy in policies:
                policy.store(table, new_keys, rows)

    def _update_reference(self) -> None:
        """Move the reference towards the policy as an exponential moving average, if the algorithm has this option."""
        options = self.stage.algorithm.get("reference")
        if self.reference is None or not isinstance(options, Mapping) or not options.get("ema"):
            return
        self.reference.follow(
            iterate_weight_pairs(self.reference.model, self.context.model),
            options["ema"],
            lambda table, keys: self.context.tables.pull(table, keys, train=False).detach(),
        )

    def _pull_trained_rows(self, share: StepShare) -> dict[str, Tensor]:
        """Pull the rows [M, D] by table with gradients enabled. Every rank must call this at the same point."""
        rows = {table: self.context.tables.pull(table, keys) for table, keys in share.keys.items()}
        return {table: row.detach().to(self.context.device).requires_grad_() for table, row in rows.items()}

    def _push_rows(self, step: int, share: StepShare, rows: Mapping[str, Tensor]) -> None:
        """Update the rows with the stage's `sparse_lr`, which follows the schedule of the dense rate."""
        assert self.stage.sparse_lr is not None
        dense_rate = self.stage.lr.compute_rate(step, self.stage.steps)
        lr = self.stage.sparse_lr * dense_rate / self.stage.lr.peak
        for table, keys in share.keys.items():
            grad = torch.zeros_like(rows[table]) if rows[table].grad is None else rows[table].grad
            assert grad is not None
            if not are_all_finite([grad]):  # Poisoned gradients skip the step on every rank.
                poison(list_gradients(self.context.dense))
                grad = torch.zeros_like(grad)
            self.context.tables.push(table, keys, grad.cpu(), self.stage.first + step + 1, lr)

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
        batch, width = move_batch(chunk.batch, self.context.device), sid_UWL.shape[1]
        needs_target = self.algorithm.needs_target(self.stage.algorithm)
        if needs_target:  # The target follows the beams as one more beam.
            target_UL = torch.from_numpy(self._prompts.find_targets(beams)).to(self.context.device)
            sid_UWL = torch.cat([sid_UWL, target_UL[:, None].to(sid_UWL.dtype)], 1)
        trie = self.context.corpus.trie
        reference_UWL = None
        if self.reference is not None:
            # A divided reference keeps no weights gathered while the policy is trained.
            with torch.no_grad(), join_passes(self.reference.model):
                reference_rows = chunk.spread(restore_policy_rows(self.reference, chunk.keys, rows))
                cache = self.reference.model.prefill(batch, reference_rows)
                votes = self._prompts.compute_votes(beams, self.reference)
                reference_UWL = compute_policy_log_prob(self.reference.model, cache, sid_UWL, trie, votes)
        cache = self.context.model.prefill(batch, chunk.spread(rows))
        votes = self._prompts.compute_votes(beams)
        logp_UWL = compute_policy_log_prob(self.context.model, cache, sid_UWL, trie, votes)
        inputs = LossInputs(
            logp_UWL=logp_UWL[:, :width],
            old_UWL=old_UWL,
            advantage_UW=advantage.value.to(self.context.device),
            valid_UW=valid_UW.to(self.context.device),
            ref_UWL=None if reference_UWL is None else reference_UWL[:, :width],
            target_UL=logp_UWL[:, -1] if needs_target else None,
            target_ref_UL=reference_UWL[:, -1] if needs_target and reference_UWL is not None else None,
            taken_UW=torch.from_numpy(self._prompts.find_hits(beams)).to(self.context.device)
            if needs_target
            else None,
            value_UWL=None if self.critic is None else self.critic.values(cache.state, sid_UWL[:, :width]),
            group_U=advantage.group_U,
            weight_UW=self._advantages.compute_draw_weights(beams, valid_UW),
            baseline_UWL=torch.from_numpy(beams["value"]).to(self.context.device)
            if "value" in beams
            else None,
        )
        return load_heavy(self.algorithm.loss)(inputs, self.stage.algorithm)

    def _sum_gradient(self, flat: Tensor) -> Tensor:
        """Sum a flat gradient over all ranks in place; that of a tensor group counts once."""
        member = self.context.member
        if not member.leads_tensor_group:
            flat.zero_()
        if member.n_trainers > 1:
            torch.distributed.all_reduce(flat, group=member.trainers)
        return flat
