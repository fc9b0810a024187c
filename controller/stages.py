"""The shipped stages: supervised (pretrain, finetune) and reinforced (rl), as loops over a `Session`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nonet.controller.options import Supervised
from nonet.controller.players import Prompts
from nonet.controller.recorder import Recorder
from nonet.controller.session import Session
from nonet.workers.gang import STEP_DEADLINE_S

# A call per chunk, not per step, keeps the controller out of a 20 ms step's way.
CHUNK_STEPS = 10
_REHEARSAL_USERS = 8

Stopped = Callable[[], bool]


def run_stage(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    """Run a stage from where it stands. False when asked to stop before its end; then it is committed."""
    body = session.scenario.stages[name]
    run = _supervised if isinstance(body, Supervised) else _reinforced
    return run(session, name, recorder, stopped)


def _supervised(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    step, stage = session.begin(name), session.stages[name]
    recorder.event("stage", stage=name, steps=stage.steps, done=step)
    every = session.scenario.checkpoint.every
    while step < stage.steps:
        if stopped():
            if step:
                session.commit(step - 1, now=True)
            return False
        stop = min(step + CHUNK_STEPS, stage.steps, (step // every + 1) * every)
        began = time.perf_counter()
        records = session.trainer.train(stage, step, stop)
        seconds = time.perf_counter() - began
        events = sum(record["events"] for record in records)
        mean = sum(record["loss"] * record["events"] for record in records) / max(1.0, events)
        shown = {
            "loss": mean,
            "rows/s": events / seconds,
            "lr": records[-1]["lr"],
            "norm": records[-1]["norm"],
            "events": events,
        }
        recorder.metrics(name, stop, shown)
        recorder.event("step", stage=name, step=stop, metrics=shown)
        for passed in range(step, stop):
            session.commit(passed)
        step = stop
    return True


def _reinforced(session: Session, name: str, recorder: Recorder, stopped: Stopped) -> bool:
    stage = session.stages[name]
    shown_start = False
    for step, prompts in session.prompts(name):
        if not shown_start:
            recorder.event("stage", stage=name, steps=stage.steps, done=step)
            shown_start = True
        began = time.perf_counter()
        beams = session.rollout.generate(prompts)
        scores = session.reward.score(beams)
        record = session.trainer.update(beams, scores)
        session.publish()
        means = {
            f"reward.{reward}": float(np.mean(future.get(STEP_DEADLINE_S)))
            for reward, future in scores.items()
        }
        total = sum(stage.weights[reward] * means[f"reward.{reward}"] for reward in scores)
        shown = {
            **record,
            **means,
            "reward": total,
            "rows/s": len(prompts.users) / (time.perf_counter() - began),
        }
        recorder.metrics(name, step + 1, shown)
        recorder.event("step", stage=name, step=step + 1, metrics=shown)
        halt = stopped() and step + 1 < stage.steps
        session.commit(step, now=halt)
        if halt:
            return False
    return True


def rehearse(session: Session) -> None:
    """Score a few beams of the untrained model with every reward, so that a broken reward fails now and not after hours."""
    for name in session.scenario.stages:
        if session.stages[name].weights:
            session.publish()
            users, positions = session.rollout.group.probe().get(STEP_DEADLINE_S)
            few = Prompts(name, 0, users[:_REHEARSAL_USERS], positions[:_REHEARSAL_USERS])
            for future in session.rewards_of(name).score(session.rollout.generate(few)).values():
                future.get(STEP_DEADLINE_S)


def probe_rewards(session: Session, name: str) -> dict[str, Any]:
    """Mean score a beam of each reward, and their weighted total, on the users that RL never trains on."""
    session.publish()
    users, positions = session.rollout.group.probe().get(STEP_DEADLINE_S)
    prompts = Prompts(name, 0, users, positions)
    scores = session.rewards_of(name).score(session.rollout.generate(prompts))
    means = {reward: float(np.mean(future.get(STEP_DEADLINE_S))) for reward, future in scores.items()}
    total = sum(weight * means[reward] for reward, weight in session.stages[name].weights.items())
    return {"means": means | {"total": total}, "prompts": len(users), "users": len(np.unique(users))}
