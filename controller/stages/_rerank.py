"""Re-ranking: the lists of before an RL stage, ordered anew by the stage's rewards, without training.

It is what a trained policy has to beat. Candidates are the likeliest items; their order is by log-probability plus a multiple
of the weighted rewards, which do not see what the user took next. One multiplier is chosen on validation prompts, by the rule
that chooses RL's step: the highest trained reward among those that keep `best.least` of the metric. Then test events are ranked
and held-out users' rewards are taken by it. Where the rewards would take longer than two minutes for that, it is left out.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nonet.atomic import write_whole
from nonet.controller.groups import PromptRequest
from nonet.controller.record import Recorder, make_rerank_name
from nonet.controller.scenario import PREFERRED, Best, Scenario, choose_best_metric
from nonet.controller.session import Session
from nonet.controller.stages._policy_scores import (
    compute_prompt_weights,
    compute_trained_reward,
    probe_prompts,
)
from nonet.models import NATS
from nonet.models.ranking import compute_per_event, select_event_metrics
from nonet.workers.runtime import GroupFuture, Shard

_CANDIDATES = 4  # times as many as a list has
_VALIDATED = 512  # validation prompts that the multiplier is chosen on
_AT_ONCE = 256  # prompts that are asked at once, where a step has fewer
_LONGEST_S = 120.0  # that scoring may take, where the scenario does not ask for it
_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
"""Multipliers that are tried, in units of the spread of log-probabilities over that of rewards among a prompt's candidates."""

# Shapes: U prompts, W items of a list, C candidates.

Candidates = tuple[PromptRequest, GroupFuture, dict[str, GroupFuture], dict[str, np.ndarray]]


def rerank(session: Session, stage: str, recorder: Recorder) -> None:
    """Re-rank the lists of the current policy by the rewards of a stage, and write the results.

    The results are the subject `<stage>_rerank`, and the rewards of held-out users in `<stage>.rewards.rerank.npz`.
    """
    if not hasattr(session.evaluator, "rank_lists"):
        return
    session.publish(stage)
    rewards = session.get_rewards(stage)
    users, positions = session.rollout.group.draw_validation_prompts(_VALIDATED).get(session.deadlines.step)
    if not len(users):
        return
    began = time.monotonic()
    all_candidates = list(_generate_candidates(session, stage, users, positions))
    if not _is_quick(session, stage, time.monotonic() - began, len(users), recorder):
        return
    unit = _compute_unit(session, all_candidates)
    rule = getattr(session.scenario.stages[stage], "best", None)
    min_share = rule.least if isinstance(rule, Best) else 0.0
    metric = choose_list_metric(session.scenario)
    results = []
    for share in _SHARES:
        total, hits = [], []
        for candidates in all_candidates:
            lists = _rerank_lists(session, candidates, share * unit)
            prompts = candidates[0]
            means = rewards.compute_means(rewards.score(lists, step=-1))
            total.append(compute_trained_reward(session, stage, means, prompts.users, prompts.positions))
            hits.append(session.rollout.group.find_target_ranks(lists).get(session.deadlines.step))
        place = np.concatenate(hits)
        results.append(
            (float(np.nanmean(np.concatenate(total))), float(compute_per_event(metric, place).mean()))
        )
    allowed = [index for index, (_, value) in enumerate(results) if value >= min_share * results[0][1]]
    best = max(allowed, key=lambda index: (results[index][0], -index))
    multiplier = _SHARES[best] * unit
    _rank_test(session, stage, multiplier)
    _keep_rewards(session, stage, multiplier)
    text = f"{make_rerank_name(stage)}: {stage}'s start re-ranked by its rewards, multiplier {multiplier:.3g} nats"
    recorder.add_event(
        "note", text=f"{text}; trained reward of validation {results[0][0]:.4f} to {results[best][0]:.4f}"
    )


def choose_list_metric(scenario: Scenario) -> str:
    """Return the metric that the multiplier must keep: the one that chooses checkpoints, where lists can be measured by it."""
    metric = choose_best_metric(scenario)
    return PREFERRED if metric == NATS or not select_event_metrics([metric]) else metric


def _is_quick(session: Session, stage: str, seconds: float, validated: int, recorder: Recorder) -> bool:
    """Return whether to re-rank: if requested, or fast enough by the time of the validation prompts; else report it."""
    test, _ = session.evaluator.test_prompts().get(session.deadlines.evaluate)
    expected_s = seconds * (len(test) / validated + len(_SHARES) / _CANDIDATES)
    control_options = getattr(session.scenario.stages[stage], "control", None)
    if getattr(control_options, "rerank", None) or expected_s <= _LONGEST_S:
        return True
    text = f"re-ranking by the rewards of {stage} is left out: it would take {expected_s:.0f} s"
    recorder.add_event("note", text=f"{text}; stages.{stage}.control: {{rerank: true}} has it")
    return False


def _get_width(session: Session, stage: str) -> int:
    return int(session.scenario.stages[stage].kind.get_width(session.scenario.stages[stage]))


def _generate_candidates(
    session: Session, stage: str, users: np.ndarray, positions: np.ndarray
) -> Iterator[Candidates]:
    """Yield prompts, some at once, with their candidates, blind scores and weights of rewards."""
    size, rewards = max(_AT_ONCE, session.stages[stage].users), session.get_rewards(stage)
    for start in range(0, len(users), size):
        part = slice(start, start + size)
        width = _CANDIDATES * _get_width(session, stage)
        prompts = PromptRequest(
            stage, 0, 0, users[part], positions[part], served=True, width=width, blind=True
        )
        beams = session.rollout.generate(prompts)
        scores = rewards.score(beams, step=-1)
        weights = compute_prompt_weights(session, stage, prompts.users, prompts.positions, len(users[part]))
        yield prompts, beams, dict(scores), weights


def _rerank_lists(session: Session, candidates: Candidates, multiplier: float) -> GroupFuture:
    """Return the lists of candidates by a multiplier."""
    prompts, beams, scores, weights = candidates
    weights_by_reward: Mapping[str, Any] = {name: weights[name] for name in scores}
    return session.rollout.group.rerank(
        beams,
        scores,
        Shard(weights_by_reward),
        multiplier=multiplier,
        width=_get_width(session, prompts.stage),
    )


def _compute_unit(session: Session, all_candidates: list[Candidates]) -> float:
    """Return the nats that one spread of the rewards is worth where it counts as much as one of log-probabilities."""
    sums = np.zeros(2)
    for _, beams, scores, weights in all_candidates:
        weights_by_reward: Mapping[str, Any] = {name: weights[name] for name in scores}
        spreads = session.rollout.group.sum_spreads(beams, scores, Shard(weights_by_reward))
        sums = sums + spreads.get(session.deadlines.step)
    return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0


def _rank_test(session: Session, stage: str, multiplier: float) -> None:
    """Rank the test events by the re-ranked lists, as a subject."""
    users, positions = session.evaluator.test_prompts().get(session.deadlines.evaluate)
    if not len(users):
        return
    places = [
        session.rollout.group.find_target_ranks(_rerank_lists(session, candidates, multiplier)).get(
            session.deadlines.step
        )
        for candidates in _generate_candidates(session, stage, users, positions)
    ]
    subject = make_rerank_name(stage)
    result = session.evaluator.rank_lists(subject, np.concatenate(places)).get(session.deadlines.evaluate)
    session.run.write_json(f"results/{subject}.json", result)


def _keep_rewards(session: Session, stage: str, multiplier: float) -> None:
    """Write the rewards of the re-ranked lists of users whom RL never trains on."""
    rewards, parts = session.get_rewards(stage), []
    for prompts in probe_prompts(session, stage, max(_AT_ONCE, session.stages[stage].users)):
        if prompts.users is None or prompts.positions is None or not len(prompts.users):
            return
        for candidates in _generate_candidates(session, stage, prompts.users, prompts.positions):
            parts.append(
                rewards.compute_means(rewards.score(_rerank_lists(session, candidates, multiplier), step=-1))
            )
    arrays: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    content = io.BytesIO()
    np.savez(content, **arrays, multiplier=np.array(multiplier))
    write_whole(session.run.results / f"{stage}.rewards.rerank.npz", content.getvalue())
