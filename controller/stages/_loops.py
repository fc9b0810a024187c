"""The shipped stages: supervised (pretrain, finetune) and reinforced (rl), as loops over a `Session`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from nonet.controller.record import Recorder
from nonet.controller.session import Session
from nonet.controller.stages._asynchronous import run_asynchronous
from nonet.controller.stages._policy_scores import (
    compute_prompt_weights,
    compute_weighted_total,
    probe_prompts,
    rescore_candidates,
    score_validation,
)
from nonet.controller.stages._reinforced_options import Reinforced
from nonet.controller.stages._step_report import (
    StepReport,
    Stopped,
    compute_machine_metrics,
    finish_stage,
    note_quarantined,
    record_report,
    report_policy_step,
)
from nonet.controller.stages.supervised import CHUNK_STEPS
from nonet.plugins import load_heavy

_REHEARSAL_USERS = 8


def run_stage(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run a stage from its current step.

    Returns:
        False if the user requested a stop before its end; then a checkpoint has been written.
    """
    loop = load_heavy(session.scenario.stages[name].kind.loop)
    return loop(session, name, recorder, stopped)


def run_supervised(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Train a supervised stage, several steps in each call, until its end or until validations stop improving."""
    step, stage = session.begin(name), session.stages[name]
    recorder.begin(name, stage.steps, step)
    every, validation = session.scenario.checkpoint.every, session.validation
    while step < stage.steps and not (validation and validation.should_stop(step)):
        if stopped():
            if step:
                session.commit(step - 1, now=True)
            return False
        stop = min(step + CHUNK_STEPS, stage.steps, (step // every + 1) * every)
        stop = min(stop, validation.find_next_point(step)) if validation else stop
        began = time.perf_counter()
        with session.trace.record_span(f"{name}.train", first=step, last=stop - 1):
            records = session.trainer.train(stage, step, stop)
        seconds = time.perf_counter() - began
        if record_report(session, recorder, name, _report_call(step, stop, records, seconds)) == "ended":
            return True
        step = stop
    finish_stage(session, recorder, name, step)
    return True


def _report_call(
    first: int, done: int, all_records: Sequence[Mapping[str, float]], seconds: float
) -> StepReport:
    """Return the report of the supervised steps [first, done), which one call took in `seconds`."""
    records = [record for record in all_records if not record.get("skipped")]
    events = sum(record["events"] for record in records)  # a skipped step's loss may be no number
    shown = {
        "loss": sum(record["loss"] * record["events"] for record in records) / max(1.0, events),
        "rows/s": events / seconds,
        "data wait": sum(record.get("waited", 0.0) for record in all_records) / seconds,
        "lr": all_records[-1]["lr"],
        "norm": all_records[-1]["norm"],
        "events": events,
    }
    further = compute_machine_metrics(all_records) | _average_extra_metrics(all_records)
    return StepReport(first, done, all_records, shown, further)


def _average_extra_metrics(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics that only some stages have: the means of further losses, the skipped steps, and the last fp16 loss scale."""
    last = records[-1]
    metrics = {
        key: sum(record[key] for record in records) / len(records) for key in last if key.endswith("_loss")
    }
    if any("skipped" in record for record in records):
        metrics["skipped"] = sum(record.get("skipped", 0.0) for record in records)
    if "scale" in last:
        metrics["scale"] = last["scale"]
    return metrics


def run_reinforced(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run an RL stage: prompts, beams, scores and an update in each step."""
    if cast(Reinforced, session.scenario.stages[name]).rollout.get_options().get("staleness"):
        return run_asynchronous(session, name, recorder, stopped)
    stage = session.stages[name]
    shown_start = False
    for step, prompts in session.iterate_prompts(name):
        if not shown_start:
            recorder.begin(name, stage.steps, step)
            recorder.record_metrics(name, step, score_validation(session, name, step))
            shown_start = True
        if session.steering.pop_changed():
            rescore_candidates(session, name, recorder)
        began = time.perf_counter()
        with session.trace.record_span(f"{name}.generate and score", step=step):
            beams = session.rollout.generate(prompts)
            scores = session.reward.score(beams)
            note_quarantined(session, recorder, name, step, scores)
        with session.trace.record_span(f"{name}.update", step=step):
            record = session.trainer.update(stage, step, beams, scores)
        session.publish()
        report = report_policy_step(session, name, step, record, time.perf_counter() - began)
        state = record_report(session, recorder, name, report, stopped)
        if state != "running":
            return state == "ended"
    finish_stage(session, recorder, name, stage.steps)
    return True


def try_rewards(session: Session) -> None:
    """Score a few beams of the untrained model with every reward, so that a broken reward fails now and not after hours."""
    for name in session.scenario.stages:
        if session.stages[name].rolls_out:
            session.publish(name)
            few = next(probe_prompts(session, name, _REHEARSAL_USERS))
            session.get_rewards(name).score(session.rollout.generate(few), strict=True, step=-1)


def probe_rewards(session: Session, name: str) -> dict[str, np.ndarray]:
    """Score the lists that users whom RL never trains on would be served.

    A call has at most as many prompts as a step, so memory that suffices for a step suffices here.

    Returns:
        Arrays [P] by reward, their mean score of a beam; "weight.<name>", the current weight of each reward; "total", the trained
        reward; "user"; and "of", the number of prompts that these were drawn from.
    """
    session.publish(name)
    rewards, parts, users, positions = session.get_rewards(name), [], [], []
    for prompts in probe_prompts(session, name, session.stages[name].users):
        parts.append(rewards.compute_means(rewards.score(session.rollout.generate(prompts), step=-1)))
        users.append(np.asarray(prompts.users))
        positions.append(np.asarray(prompts.positions))
    means = {reward: np.concatenate([part[reward] for part in parts]) for reward in rewards.groups}
    user, position = np.concatenate(users), np.concatenate(positions)
    weights = compute_prompt_weights(session, name, user, position, len(user))
    total = compute_weighted_total(means, weights)
    of = session.rollout.group.count_held_out_prompts().get(session.deadlines.step)
    shown = {f"weight.{reward}": weight for reward, weight in weights.items()}
    return means | shown | {"total": total, "user": user, "of": np.array(of)}
