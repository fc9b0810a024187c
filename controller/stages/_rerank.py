"""Re-ranking: orders the lists of the policy before an RL stage by the stage's rewards, without training.

The result is a baseline for the trained policy. Candidates are the likeliest items. They are ordered by log-probability plus
a multiple of the weighted rewards, which do not see the item that the user took next. The multiplier is chosen on validation
prompts, by the rule that selects the step of an RL stage: the highest trained reward among those that keep the share
`best.least` of the metric. With this multiplier, the test events are ranked and the rewards of held-out users are computed.
If scoring would take longer than two minutes, re-ranking is left out unless the scenario requests it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nonet.atomic import write_arrays
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

_CANDIDATES_PER_ITEM = 4  # candidates per item of a list
_VALIDATION_PROMPTS = 512  # prompts on which the multiplier is chosen
_MIN_PROMPTS_PER_CALL = 256  # a call has as many prompts as a step, and at least this number
_MAX_UNREQUESTED_S = 120.0  # how long scoring may take if the scenario does not request re-ranking
_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
"""The multipliers that are tried, in units of the ratio of two spreads among the candidates of a prompt: of log-probabilities,
and of rewards."""

# Shapes: U prompts, W items of a list, C candidates.

Candidates = tuple[PromptRequest, GroupFuture, dict[str, GroupFuture], dict[str, np.ndarray]]
"""The prompts of one call, their candidates [U, C], the scores [U, C] by reward, and the weights [U] by reward."""


def rerank(session: Session, stage: str, recorder: Recorder) -> None:
    """Re-rank the lists of the current policy by the rewards of a stage, and write the results.

    The results are the subject `<stage>_rerank`, and the rewards of held-out users in `<stage>.rewards.rerank.npz`.
    """
    if not hasattr(session.evaluator, "rank_lists"):
        return
    session.publish(stage)
    rewards = session.get_rewards(stage)
    users, positions = session.rollout.group.draw_validation_prompts(_VALIDATION_PROMPTS).get(
        session.deadlines.step
    )
    if not len(users):
        return
    began = time.monotonic()
    all_candidates = list(_generate_candidates(session, stage, users, positions))
    if not _is_quick(session, stage, time.monotonic() - began, len(users), recorder):
        return
    unit = _compute_unit(session, all_candidates)
    selection = getattr(session.scenario.stages[stage], "best", None)
    min_share = selection.least if isinstance(selection, Best) else 0.0
    metric = choose_list_metric(session.scenario)
    results = []  # by share: (trained reward, metric); the first share, 0, keeps the lists as they are
    for share in _SHARES:
        totals, rank_parts = [], []
        for candidates in all_candidates:
            lists = _rerank_lists(session, candidates, share * unit)
            prompts = candidates[0]
            means = rewards.compute_means(rewards.score(lists, step=-1))
            totals.append(compute_trained_reward(session, stage, means, prompts.users, prompts.positions))
            rank_parts.append(session.rollout.group.find_target_ranks(lists).get(session.deadlines.step))
        ranks = np.concatenate(rank_parts)
        results.append(
            (float(np.nanmean(np.concatenate(totals))), float(compute_per_event(metric, ranks).mean()))
        )
    allowed = [index for index, (_, value) in enumerate(results) if value >= min_share * results[0][1]]
    best = max(allowed, key=lambda index: (results[index][0], -index))
    multiplier = _SHARES[best] * unit
    _write_test_ranking(session, stage, multiplier)
    _write_rewards(session, stage, multiplier)
    text = f"{make_rerank_name(stage)}: {stage}'s start re-ranked by its rewards, multiplier {multiplier:.3g} nats"
    recorder.add_event(
        "note",
        text=f"{text}; trained reward of validation {results[0][0]:.4f} to {results[best][0]:.4f}",
    )


def choose_list_metric(scenario: Scenario) -> str:
    """Return the metric that the multiplier must keep: the one that selects checkpoints, if it can be computed from lists."""
    metric = choose_best_metric(scenario)
    return PREFERRED if metric == NATS or not select_event_metrics([metric]) else metric


def _is_quick(session: Session, stage: str, seconds: float, prompt_count: int, recorder: Recorder) -> bool:
    """Return whether to re-rank: if the scenario requests it, or if it is expected to be fast; else record a note.

    Args:
        session: The session.
        stage: The RL stage.
        seconds: The time in which the candidates of the validation prompts were generated and scored.
        prompt_count: The number of these prompts.
        recorder: Takes the note.
    """
    test_users, _ = session.evaluator.test_prompts().get(session.deadlines.evaluate)
    # The test prompts are generated and scored like the validation prompts; each multiplier then scores lists of the latter.
    expected_s = seconds * (len(test_users) / prompt_count + len(_SHARES) / _CANDIDATES_PER_ITEM)
    control_options = getattr(session.scenario.stages[stage], "control", None)
    if getattr(control_options, "rerank", None) or expected_s <= _MAX_UNREQUESTED_S:
        return True
    text = f"re-ranking by the rewards of {stage} is left out: it would take {expected_s:.0f} s"
    recorder.add_event("note", text=f"{text}; stages.{stage}.control: {{rerank: true}} has it")
    return False


def _get_width(session: Session, stage: str) -> int:
    """Return the number of items of a list."""
    return int(session.scenario.stages[stage].kind.get_width(session.scenario.stages[stage]))


def _generate_candidates(
    session: Session, stage: str, users: np.ndarray, positions: np.ndarray
) -> Iterator[Candidates]:
    """Yield the candidates of prompts, one call at a time, with scores that do not see the item that the user took next."""
    call_size, rewards = max(_MIN_PROMPTS_PER_CALL, session.stages[stage].users), session.get_rewards(stage)
    for start in range(0, len(users), call_size):
        rows = slice(start, start + call_size)
        width = _CANDIDATES_PER_ITEM * _get_width(session, stage)
        prompts = PromptRequest(
            stage, step=0, users=users[rows], positions=positions[rows], served=True, width=width, blind=True
        )
        beams = session.rollout.generate(prompts)
        scores = rewards.score(beams, step=-1)
        weights = compute_prompt_weights(session, stage, prompts.users, prompts.positions, len(users[rows]))
        yield prompts, beams, dict(scores), weights


def _rerank_lists(session: Session, candidates: Candidates, multiplier: float) -> GroupFuture:
    """Return lists [U, W]: the candidates with the highest log-probability plus `multiplier` times weighted reward."""
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
    """Return the multiplier with which the spreads of weighted rewards and of log-probabilities are equal; 0 without spread."""
    sums = np.zeros(2)
    for _, beams, scores, weights in all_candidates:
        weights_by_reward: Mapping[str, Any] = {name: weights[name] for name in scores}
        spreads = session.rollout.group.sum_spreads(beams, scores, Shard(weights_by_reward))
        sums = sums + spreads.get(session.deadlines.step)
    return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0


def _write_test_ranking(session: Session, stage: str, multiplier: float) -> None:
    """Rank the test events by the re-ranked lists, and write the metrics to RUN/results."""
    users, positions = session.evaluator.test_prompts().get(session.deadlines.evaluate)
    if not len(users):
        return
    rank_parts = [
        session.rollout.group.find_target_ranks(_rerank_lists(session, candidates, multiplier)).get(
            session.deadlines.step
        )
        for candidates in _generate_candidates(session, stage, users, positions)
    ]
    subject = make_rerank_name(stage)
    result = session.evaluator.rank_lists(subject, np.concatenate(rank_parts)).get(session.deadlines.evaluate)
    session.require_stored(session.run.results / f"{subject}.npz")
    session.run.write_json(f"results/{subject}.json", result)


def _write_rewards(session: Session, stage: str, multiplier: float) -> None:
    """Write the rewards of the re-ranked lists of held-out users to RUN/results; nothing if there are none."""
    rewards, parts = session.get_rewards(stage), []
    for prompts in probe_prompts(session, stage, max(_MIN_PROMPTS_PER_CALL, session.stages[stage].users)):
        if prompts.users is None or prompts.positions is None or not len(prompts.users):
            return
        for candidates in _generate_candidates(session, stage, prompts.users, prompts.positions):
            parts.append(
                rewards.compute_means(rewards.score(_rerank_lists(session, candidates, multiplier), step=-1))
            )
    arrays: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    file = session.run.results / f"{stage}.rewards.rerank.npz"
    write_arrays(file, **arrays, multiplier=np.array(multiplier))
