"""PolicyMetrics: computes the record of an RL step over the prompts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nonet.models.generation import move_batch
from nonet.models.policy import compute_catalogue_log_prob, compute_kl, entropy
from nonet.rl.algorithms import Algorithm
from nonet.workers import FrozenPolicy
from nonet.workers.roles import LearnerContext, StageSetup
from nonet.workers.roles.learners.policy_prompts import PolicyPrompts, restore_policy_rows, select_rows

# Shapes: U prompts, W beams, I items.

_PLACES = 4096  # Bins in which items are counted: exact for catalogues of up to this size.
_WATCHED, _MOST_ITEMS = 8, 25_000  # Limits of exact metrics: prompts per step, and items.


@dataclass(frozen=True)
class PolicyMetrics:
    """Computes the metrics of one RL step.

    Attributes:
        context: Objects shared with the trainer.
        stage: The RL stage, with the weights of rewards at this step.
        algorithm: The algorithm of the stage.
        reference: The policy that a KL term compares with; None where the algorithm needs none.
        prompts: Makes batches of the prompts.
    """

    context: LearnerContext
    stage: StageSetup
    algorithm: Algorithm
    reference: FrozenPolicy | None
    prompts: PolicyPrompts

    def make_record(
        self, totals: Sequence[float], count: float, facts: Sequence[float], rewards: Sequence[str]
    ) -> dict[str, float]:
        """Compute a step's means over all ranks: of losses per code, of rewards per beam.

        Args:
            totals: Sums over codes of loss, kl, clipped, ratio and the algorithm's further values.
            count: Number of codes.
            facts: Sums over prompts: flat groups, groups without a hit, scored prompts, the three values of `measure_exactly`,
                the mean score of each reward, and all prompts.
            rewards: Names of the rewards.
        """
        names = ("loss", "kl", "clipped", "ratio", *self.algorithm.more)
        record = {name: total / count for name, total in zip(names, totals, strict=True)}
        flat, missed, prompts, watched, entropies, divergences = facts[:6]
        asked = facts[-1]
        record |= {"flat_groups": flat, "prompts": asked, "no_hit": missed / max(1.0, asked)}
        record |= {"unscored": asked - prompts} if asked > prompts else {}
        if watched:
            record["entropy"] = entropies / watched
            record |= {"kl_exact": divergences / watched} if self.reference is not None else {}
        means = {name: total / max(1.0, prompts) for name, total in zip(rewards, facts[6:-1], strict=True)}
        record |= {f"reward.{name}": mean for name, mean in means.items()}
        record["reward"] = sum(self.stage.weights[name] * mean for name, mean in means.items())
        return record

    def measure_scenes(
        self, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray], record: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute the metrics of each scene, and `reward` over all scenes with each scene's weights.

        The metrics of a scene are the number of prompts, the share of groups without their target, the mean rewards, and their
        sum with the scene's weights.

        Args:
            beams: Rollouts of this rank's prompts.
            scores: Scores [U, W] by reward.
            record: Record of the step.
        """
        setup = self.context.run.scenes.get(self.stage.name)
        if setup is None or not setup.names or "scene" not in beams:
            return {}
        scene_U, titles = beams["scene"], (*setup.names, "others")
        missed_U = np.logical_not(self.prompts.find_hits(beams).any(1))
        means = {name: np.mean(np.where(beams["valid"], score, 0), 1) for name, score in scores.items()}
        sums = [
            float(values[scene_U == index].sum())
            for index in range(len(titles))
            for values in (np.ones(len(scene_U)), missed_U, *means.values())
        ]
        totals, found, whole = self.context.member.sum_over_trainers(*sums), {}, 0.0
        for index, title in enumerate(titles):
            count, missed, *rewards = totals[index * (2 + len(means)) : (index + 1) * (2 + len(means))]
            if not count:
                continue
            own = {
                name: setup.get_weights(name, weight, np.array([index]))[0]
                for name, weight in self.stage.weights.items()
            }
            reward = sum(own[name] * value for name, value in zip(means, rewards, strict=True))
            whole += reward
            values = {"prompts": count, "no_hit": missed / count, "reward": reward / count}
            values |= {f"reward.{name}": value / count for name, value in zip(means, rewards, strict=True)}
            found |= {f"scene.{title}.{name}": value for name, value in values.items()}
        return found | {"reward": whole / max(1.0, record["prompts"] - record.get("unscored", 0.0))}

    @torch.no_grad()
    def measure_exactly(self, beams: Mapping[str, Any]) -> tuple[float, float, float]:
        """Compute the exact entropy of the policy, and its exact KL divergence from the reference, for the first few prompts.

        Returns:
            Number of these prompts, and sums over them of the entropy and of the divergence, in nats over the whole catalogue;
            zeros for large catalogues.
        """
        few = select_rows(beams, slice(0, min(_WATCHED, self.stage.chunk)))
        if self.context.corpus.trie.n_leaves > _MOST_ITEMS:
            return 0.0, 0.0, 0.0
        share = self.prompts.make_share(few, [slice(None)])
        rows, chunk = share.pull_frozen_rows(self.context.sparse), next(iter(share))
        if not len(few["user"]):
            return 0.0, 0.0, 0.0
        batch, policy_UI, other = move_batch(chunk.batch, self.context.device), torch.empty(0), []
        for frozen in [None] if self.reference is None else [None, self.reference]:
            model = self.context.model if frozen is None else frozen.model
            cache = model.prefill(batch, chunk.spread(restore_policy_rows(frozen, chunk.keys, rows)))
            found = compute_catalogue_log_prob(
                model, cache, self.context.corpus.trie, self.prompts.compute_votes(few, frozen)
            )
            if frozen is None:
                policy_UI = found
            else:
                other.append(found)
        apart = float(compute_kl(policy_UI, other[0]).sum()) if other else 0.0
        return float(len(policy_UI)), float(entropy(policy_UI).sum()), apart

    def measure_breadth(self, beams: Mapping[str, Any]) -> dict[str, float]:
        """Compute diversity and coverage: the distinct items in all ranks' beams as a share of the beams and of the catalogue."""
        if "item" not in beams:
            return {}
        items, places = self.context.corpus.trie.n_leaves, min(self.context.corpus.trie.n_leaves, _PLACES)
        held = np.bincount(beams["item"][beams["valid"]] % places, minlength=places) > 0
        *held, beams_there = self.context.member.sum_over_trainers(
            *held.astype(float).tolist(), float(beams["valid"].sum())
        )
        different = float(np.count_nonzero(held))
        if items > places:  # Linear counting estimates the number of items that share a bin.
            different = places * math.log(places / max(1.0, places - different))
        different = min(different, beams_there)
        return {"diversity": different / max(1.0, beams_there), "coverage": different / max(1, items)}


def sum_scores(valid_UW: np.ndarray, scores: Mapping[str, np.ndarray]) -> list[float]:
    """Return the sum over prompts of each reward's mean score per beam."""
    return [
        float(np.mean(np.where(valid_UW, score, 0))) * len(score) if len(score) else 0.0
        for score in scores.values()
    ]
