"""PolicyMetrics: computes the metrics of an RL step over the prompts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nonet.models.generation import move_batch
from nonet.rl.algorithms import Algorithm
from nonet.rl.policy import compute_catalogue_log_prob, compute_kl, entropy
from nonet.workers import FrozenPolicy
from nonet.workers.engines.division import join_passes
from nonet.workers.roles import LearnerContext, StageSetup
from nonet.workers.roles.learners.policy_prompts import PolicyPrompts, restore_policy_rows, select_rows

# Shapes: U prompts, W beams, I items.

# Number of bins in which distinct items are counted. The count is exact if the catalogue has no more items than bins.
_ITEM_BINS = 4096
_MAX_EXACT_PROMPTS, _MAX_EXACT_ITEMS = 8, 25_000  # Limits for `measure_exactly`: prompts per step, and items.


@dataclass(frozen=True)
class PolicyMetrics:
    """Computes the metrics of one RL step.

    Attributes:
        context: Objects shared with the trainer.
        stage: The RL stage, with the reward weights of this step.
        algorithm: The algorithm of the stage.
        reference: Reference policy of the KL term; None if the algorithm needs none.
        prompts: Builds batches of the prompts.
    """

    context: LearnerContext
    stage: StageSetup
    algorithm: Algorithm
    reference: FrozenPolicy | None
    prompts: PolicyPrompts

    def make_record(
        self, totals: Sequence[float], count: float, prompt_sums: Sequence[float], rewards: Sequence[str]
    ) -> dict[str, float]:
        """Compute the record of a step from sums over all ranks: mean losses per code, and mean rewards per beam.

        Args:
            totals: Sums over codes of loss, kl, clipped, ratio and the algorithm's further values.
            count: Number of codes.
            prompt_sums: Sums over prompts: flat groups, groups without a hit, scored prompts, the three values of
                `measure_exactly`, the mean score of each reward, and the number of all prompts.
            rewards: Names of the rewards.
        """
        names = ("loss", "kl", "clipped", "ratio", *self.algorithm.more)
        record = {name: total / count for name, total in zip(names, totals, strict=True)}
        flat_groups, missed_groups, scored_prompts, exact_prompts, entropies, divergences = prompt_sums[:6]
        all_prompts = prompt_sums[-1]
        record |= {
            "flat_groups": flat_groups,
            "prompts": all_prompts,
            "no_hit": missed_groups / max(1.0, all_prompts),
        }
        record |= {"unscored": all_prompts - scored_prompts} if all_prompts > scored_prompts else {}
        if exact_prompts:
            record["entropy"] = entropies / exact_prompts
            record |= {"kl_exact": divergences / exact_prompts} if self.reference is not None else {}
        means = {
            name: total / max(1.0, scored_prompts)
            for name, total in zip(rewards, prompt_sums[6:-1], strict=True)
        }
        record |= {f"reward.{name}": mean for name, mean in means.items()}
        record["reward"] = sum(self.stage.weights[name] * mean for name, mean in means.items())
        return record

    def measure_scenes(
        self, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray], record: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute the metrics of each scene, and `reward` over all scenes with each scene's weights.

        The metrics of a scene are the number of prompts, the share of prompts without their target among the beams, the mean of
        each reward, and the sum of these means weighted by the scene's weights.

        Args:
            beams: Rollouts of this rank's prompts.
            scores: Scores [U, W] by reward.
            record: Record of the step.

        Returns:
            `scene.<name>.<metric>` of each scene that has prompts, and `reward`; empty for a stage without scenes.
        """
        setup = self.context.run.scenes.get(self.stage.name)
        if setup is None or not setup.names or "scene" not in beams:
            return {}
        scene_U, titles = beams["scene"], (*setup.names, "others")
        missed_U = np.logical_not(self.prompts.find_hits(beams).any(1))
        mean_U = {name: np.mean(np.where(beams["valid"], score, 0), 1) for name, score in scores.items()}
        sums_per_scene = 2 + len(mean_U)  # The number of prompts, the number without a hit, and each reward.
        sums = [
            float(values[scene_U == index].sum())
            for index in range(len(titles))
            for values in (np.ones(len(scene_U)), missed_U, *mean_U.values())
        ]
        totals, metrics, reward_sum = self.context.member.sum_over_trainers(*sums), {}, 0.0
        for index, title in enumerate(titles):
            count, missed, *rewards = totals[index * sums_per_scene : (index + 1) * sums_per_scene]
            if not count:
                continue
            scene_weights = {
                name: setup.get_weights(name, weight, np.array([index]))[0]
                for name, weight in self.stage.weights.items()
            }
            reward = sum(scene_weights[name] * value for name, value in zip(mean_U, rewards, strict=True))
            reward_sum += reward
            values = {"prompts": count, "no_hit": missed / count, "reward": reward / count}
            values |= {f"reward.{name}": value / count for name, value in zip(mean_U, rewards, strict=True)}
            metrics |= {f"scene.{title}.{name}": value for name, value in values.items()}
        scored_prompts = record["prompts"] - record.get("unscored", 0.0)
        return metrics | {"reward": reward_sum / max(1.0, scored_prompts)}

    @torch.no_grad()
    def measure_exactly(self, beams: Mapping[str, Any]) -> tuple[float, float, float]:
        """Compute the exact entropy of the policy, and its exact KL divergence from the reference, for the first few prompts.

        Returns:
            Number of these prompts, and sums over them of the entropy and of the divergence, in nats over the whole catalogue.
            All are 0 for a catalogue of more than 25,000 items.
        """
        selected = select_rows(beams, slice(0, min(_MAX_EXACT_PROMPTS, self.stage.chunk)))
        if self.context.corpus.trie.n_leaves > _MAX_EXACT_ITEMS:
            return 0.0, 0.0, 0.0
        share = self.prompts.make_share(selected, [slice(None)])
        rows, chunk = share.pull_frozen_rows(self.context.tables), next(iter(share))
        log_probs: list[torch.Tensor] = []  # [U, I] of the policy, then of the reference if there is one.
        for frozen in [None] if self.reference is None else [None, self.reference]:
            model = self.context.model if frozen is None else frozen.model
            with join_passes(model):
                if not len(selected["user"]):
                    continue
                batch = move_batch(chunk.batch, self.context.device)
                cache = model.prefill(batch, chunk.spread(restore_policy_rows(frozen, chunk.keys, rows)))
                votes = self.prompts.compute_votes(selected, frozen)
                log_probs.append(compute_catalogue_log_prob(model, cache, self.context.corpus.trie, votes))
        if not log_probs:
            return 0.0, 0.0, 0.0
        policy_UI, *reference_UI = log_probs
        divergence = float(compute_kl(policy_UI, reference_UI[0]).sum()) if reference_UI else 0.0
        return float(len(policy_UI)), float(entropy(policy_UI).sum()), divergence

    def measure_breadth(self, beams: Mapping[str, Any]) -> dict[str, float]:
        """Compute how many distinct items the beams of all ranks have.

        Returns:
            "diversity": distinct items per beam; "coverage": distinct items per item of the catalogue. Empty if the beams have
            no items.
        """
        if "item" not in beams:
            return {}
        n_items = self.context.corpus.trie.n_leaves
        n_bins = min(n_items, _ITEM_BINS)
        is_occupied = np.bincount(beams["item"][beams["valid"]] % n_bins, minlength=n_bins) > 0
        *ranks_per_bin, n_beams = self.context.member.sum_over_trainers(
            *is_occupied.astype(float).tolist(), float(beams["valid"].sum())
        )
        n_distinct = float(np.count_nonzero(ranks_per_bin))
        if n_items > n_bins:  # Linear counting: estimate the distinct items from the number of occupied bins.
            n_distinct = n_bins * math.log(n_bins / max(1.0, n_bins - n_distinct))
        n_distinct = min(n_distinct, n_beams)
        return {"diversity": n_distinct / max(1.0, n_beams), "coverage": n_distinct / max(1, n_items)}


def sum_scores(valid_UW: np.ndarray, scores: Mapping[str, np.ndarray]) -> list[float]:
    """Return for each reward the sum over prompts of the mean score of a prompt's beams."""
    return [
        float(np.mean(np.where(valid_UW, score, 0))) * len(score) if len(score) else 0.0
        for score in scores.values()
    ]
