"""Looks at a stage while it trains: rewards of held-out users, the trained reward of validation prompts, validations answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nonet.controller.groups import Prompts
from nonet.controller.record import Recorder
from nonet.controller.scenario import REWARD
from nonet.controller.session import Session
from nonet.workers.roles import SceneSetup

_LOOKS, _LEAST = (
    10,
    10,
)  # how often a stage is looked at on held-out users, and steps between two looks at least
_VALIDATED = 512  # validation prompts that the trained reward is taken of


def by_pool(session: Session, record: Mapping[str, float]) -> dict[str, float]:
    """A step's record, in which how far rollout and trainer are apart names the pool that rolled out."""
    if not any(name.startswith("mismatch/") for name in record):
        return dict(record)
    pool = next(group.pool for group in session.plan.groups if "rollout" in group.roles)
    return {
        f"{name}.{pool}" if name.startswith("mismatch/") else name: value for name, value in record.items()
    }


def held_out(session: Session, stage: str, done: int) -> dict[str, float]:
    """What would be recommended to held-out users, as many as a step has, after `done` steps: recall of it, and the trained
    reward beside. Ten times a stage, nothing otherwise."""
    if done % max(_LEAST, session.stages[stage].steps // _LOOKS):
        return {}
    prompts = next(probe_prompts(session, stage, session.stages[stage].users))
    if prompts.users is None or not len(prompts.users):
        return {}
    beams = session.rollout.generate(prompts)
    rewards = session.reward
    means = rewards.means(rewards.score(beams))
    hits, asked = session.trainer.group.hits(beams).get(session.deadlines.step)
    total = trained(session, stage, means, prompts.users, prompts.positions)
    return {
        "held-out recall": float(hits / max(1.0, asked)),
        "held-out reward": float(np.nanmean(total)),
    }


def trained(
    session: Session,
    stage: str,
    means: Mapping[str, np.ndarray],
    users: np.ndarray | None,
    positions: np.ndarray | None,
) -> np.ndarray:
    """What the stage trains [P], of each prompt's mean rewards [P]: by its weights, those of its scene where there are some."""
    weights, body = session.stages[stage].weights, session.scenario.stages[stage]
    setup: SceneSetup | None = body.kind.scenes(body)
    scene = None
    if setup is not None and setup.names:
        scene = session.rollout.group.scene_of(stage, users, positions).get(session.deadlines.step)
    total = np.zeros(len(next(iter(means.values()))))
    for name, weight in weights.items():
        if name in means:
            own = weight if scene is None or setup is None else setup.weights_of(name, weight, scene)
            total = total + own * means[name]
    return total


def validated_reward(session: Session, stage: str, done: int) -> dict[str, float]:
    """The trained reward of validation prompts after `done` steps, kept for the validation that is asked for there; nothing
    where none is, or the stage is not judged by it."""
    validation = session.validation
    if validation is None or not validation.rule.reward or done not in validation.points:
        return {}
    users, positions = session.rollout.group.validation_prompts(_VALIDATED).get(session.deadlines.step)
    size, rewards = session.stages[stage].users, session.reward
    sums: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(users), size):
        part = slice(start, start + size)
        prompts = Prompts(stage, 0, 0, users[part], positions[part], served=True)
        for name, means in rewards.means(rewards.score(session.rollout.generate(prompts))).items():
            sums.setdefault(name, []).append(means)
    each = {name: np.concatenate(parts) for name, parts in sums.items()}
    total = float(np.nanmean(trained(session, stage, each, users, positions)))
    known = {name: float(np.nanmean(values)) for name, values in each.items()}
    assert session.objectives is not None
    validation.kept.rewarded(done, total, session.objectives.missing(known))
    return {"validation reward": total} | {f"validation reward.{name}": mean for name, mean in known.items()}


def validated(session: Session, recorder: Recorder, stage: str, step: int, *, over: bool = False) -> None:
    """Show the validations that have been answered, beside the newest step; in the end, which commit goes on."""
    validation = session.validation
    if validation is None:
        return
    metric = validation.rule.metric
    for entry in validation.news():
        values = {f"validation {name}": value for name, value in entry["metrics"].items()}
        if entry["nats"] is not None:
            values["validation nats"] = entry["nats"]
        recorder.metrics(stage, entry["step"], values, role="evaluator")
        shown = {f"valid {metric}": validation.value(entry)}
        recorder.event("step", stage=stage, step=step, metrics=shown)
    if over and (end := validation.kept.end):
        best = validation.best()
        metric = end["metric"]
        value = f" ({best['reward'] if metric == REWARD else validation.value(best):.4f})" if best else ""
        text = f"{stage}: best at step {end['best']} of {end['steps']} by {metric} of validation{value}"
        text += f"; stopped after {end['ran']}" if end["ran"] < end["steps"] else ""
        recorder.event("note", text=text)


def probe_prompts(session: Session, name: str, size: int) -> Iterator[Prompts]:
    """The prompts that a stage's rewards are probed with, so many at a time."""
    body = session.scenario.stages[name]
    most = getattr(body, "probe", None)
    users, positions = session.rollout.group.heldout_prompts(most).get(session.deadlines.step)
    for start in range(0, max(1, len(users)), size):
        part = slice(start, start + size)
        yield Prompts(name, 0, 0, users[part], positions[part], served=True)
