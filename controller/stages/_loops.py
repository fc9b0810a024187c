"""The loop of supervised stages (pretrain, finetune), and the trials and comparisons of rewards around RL stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from nonet.controller.record import Recorder
from nonet.controller.session import Session
from nonet.controller.stages._policy_scores import (
    compute_prompt_weights,
    compute_weighted_total,
    probe_prompts,
)
from nonet.controller.stages._step_report import (
    StepReport,
    Stopped,
    compute_machine_metrics,
    finish_stage,
    record_report,
)
from nonet.controller.stages.supervised import CHUNK_STEPS
from nonet.plugins import load_heavy

_REHEARSAL_PROMPTS = 8  # prompts on which rewards are tried before a run


def run_stage(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run a stage from its current step.

    Returns:
        False if the user requested a stop before its end; then a checkpoint has been written.
    """
    loop = load_heavy(session.scenario.stages[name].kind.loop)
    return loop(session, name, recorder, stopped)


def run_supervised(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Train a supervised stage, several steps per call, until its end or until validations stop improving.

    Returns:
        False if the user requested a stop before its end.
    """
    step, stage = session.begin(name), session.stages[name]
    recorder.begin(name, stage.steps, step)
    checkpoint_interval, validation = session.scenario.checkpoint.every, session.validation
    while step < stage.steps and not (validation and validation.should_stop(step)):
        if stopped():
            session.save_applied_steps()
            return False
        next_checkpoint = (step // checkpoint_interval + 1) * checkpoint_interval
        stop = min(step + CHUNK_STEPS, stage.steps, next_checkpoint)
        stop = min(stop, validation.find_next_point(step)) if validation else stop
        stop = min(stop, session.scaling.find_next_step(name, step) or stop)
        began = time.perf_counter()
        with session.trace.record_span(f"{name}.train", first=step, last=stop - 1):
            records = session.trainer.train(stage, step, stop)
        seconds = time.perf_counter() - began
        if record_report(session, recorder, name, _make_call_report(step, stop, records, seconds)) == "ended":
            return True
        step = stop
    finish_stage(session, recorder, name, step)
    return True


def _make_call_report(
    first: int, done: int, all_records: Sequence[Mapping[str, float]], seconds: float
) -> StepReport:
    """Return the report of the supervised steps [first, done), which one call executed in `seconds`."""
    records = [record for record in all_records if not record.get("skipped")]
    events = sum(record["events"] for record in records)  # the loss of a skipped step may be NaN
    shown = {
        "loss": sum(record["loss"] * record["events"] for record in records) / max(1.0, events),
        "rows/s": events / seconds,
        "data wait": sum(record.get("waited", 0.0) for record in all_records) / seconds,
        "lr": all_records[-1]["lr"],
        "norm": all_records[-1]["norm"],
        "events": events,
    }
    further = compute_machine_metrics(all_records) | _average_extra_metrics(all_records)
    return StepReport(first=first, done=done, records=all_records, shown=shown, further=further)


def _average_extra_metrics(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics that only some stages have: means of further losses, number of skipped steps, last fp16 loss scale."""
    last = records[-1]
    metrics = {
        key: sum(record[key] for record in records) / len(records) for key in last if key.endswith("_loss")
    }
    if any("skipped" in record for record in records):
        metrics["skipped"] = sum(record.get("skipped", 0.0) for record in records)
    if "scale" in last:
        metrics["scale"] = last["scale"]
    return metrics


def try_rewards(session: Session) -> None:
    """Score a few beams of the untrained model with every reward, so that a broken reward fails before the run."""
    for name in session.scenario.stages:
        if session.stages[name].rolls_out:
            session.publish(name)
            prompts = next(probe_prompts(session, name, _REHEARSAL_PROMPTS))
            session.get_rewards(name).score(session.rollout.generate(prompts), strict=True, step=-1)


def probe_rewards(session: Session, name: str) -> dict[str, np.ndarray]:
    """Score the lists that held-out users, whom RL never trains on, would be served.

    A call has at most as many prompts as a step, so memory that suffices for a step suffices here.

    Returns:
        Arrays [P] of the prompts: by name of a reward, the mean score over a list; by "weight.<name>", its current weight;
        "total", the trained reward; and "user". "of" is the number of prompts from which these were drawn.
    """
    session.publish(name)
    rewards, mean_parts, users, positions = session.get_rewards(name), [], [], []
    for prompts in probe_prompts(session, name, session.stages[name].users):
        mean_parts.append(rewards.compute_means(rewards.score(session.rollout.generate(prompts), step=-1)))
        users.append(np.asarray(prompts.users))
        positions.append(np.asarray(prompts.positions))
    means = {reward: np.concatenate([part[reward] for part in mean_parts]) for reward in rewards.groups}
    user_P, position_P = np.concatenate(users), np.concatenate(positions)
    weights = compute_prompt_weights(session, name, user_P, position_P, len(user_P))
    total_P = compute_weighted_total(means, weights)
    prompt_count = session.rollout.group.count_held_out_prompts().get(session.deadlines.step)
    weight_arrays = {f"weight.{reward}": weight for reward, weight in weights.items()}
    return means | weight_arrays | {"total": total_P, "user": user_P, "of": np.array(prompt_count)}
