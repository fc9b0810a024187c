"""The rewards of the lists that a policy would serve, for held-out users and for validation prompts of an RL stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from nonet.controller.groups import PromptRequest
from nonet.controller.record import Recorder
from nonet.controller.session import Session, recompute_rewards, sum_by_scene
from nonet.workers.roles import SceneSetup

_PROBES_PER_STAGE = 10  # how often held-out users are scored in a stage
_MIN_STEPS_BETWEEN_PROBES = 10  # in short stages, held-out users are scored less often
_VALIDATION_PROMPTS = 512  # number of prompts over which the trained reward is averaged


def score_held_out(session: Session, stage: str, done: int) -> dict[str, float]:
    """Score the lists that held-out users would be served after `done` steps, at most ten times per stage.

    In a stage without validation, these lists also update the ratios by which floors are applied (`RewardObjectives`).

    Returns:
        The recall of the users' next items and the trained reward, as metrics; empty after all other steps.
    """
    if done % max(_MIN_STEPS_BETWEEN_PROBES, session.stages[stage].steps // _PROBES_PER_STAGE):
        return {}
    prompts = next(probe_prompts(session, stage, session.stages[stage].users))
    if prompts.users is None or not len(prompts.users):
        return {}
    beams = session.rollout.generate(prompts)
    rewards = session.reward
    means = rewards.compute_means(rewards.score(beams, step=-1))
    hits, prompt_count = session.trainer.group.count_hits(beams).get(session.deadlines.step)
    if session.objectives is not None and session.validation is None:
        session.objectives.note_served({name: float(np.nanmean(values)) for name, values in means.items()})
    total = compute_trained_reward(session, stage, means, prompts.users, prompts.positions)
    return {
        "held-out recall": float(hits / max(1.0, prompt_count)),
        "held-out reward": float(np.nanmean(total)),
    }


def compute_prompt_weights(
    session: Session, stage: str, users: np.ndarray | None, positions: np.ndarray | None, count: int
) -> dict[str, np.ndarray]:
    """Return the current weight of each reward for each prompt [P], which depends on the scene if the stage has scenes.

    Args:
        session: The session; its rewards may have been attached, detached or set since the stage began.
        stage: The RL stage.
        users: User of each prompt.
        positions: Position of each prompt in its user's sequence.
        count: The number of prompts.
    """
    setup, scene_P = _find_scenes(session, stage, users, positions)
    return {
        name: np.full(count, weight)
        if scene_P is None or setup is None
        else setup.get_weights(name, weight, scene_P)
        for name, weight in session.compute_current_weights(stage).items()
    }


def compute_trained_reward(
    session: Session,
    stage: str,
    means: Mapping[str, np.ndarray],
    users: np.ndarray | None,
    positions: np.ndarray | None,
) -> np.ndarray:
    """Return the trained reward of each prompt [P]: the sum of its mean rewards [P] with the current weights."""
    count = len(next(iter(means.values())))
    return compute_weighted_total(means, compute_prompt_weights(session, stage, users, positions, count))


def compute_weighted_total(means: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the weighted sum [P] of each prompt's mean rewards; a reward that `means` lacks is left out."""
    total = np.zeros(len(next(iter(means.values()))))
    for name, weight in weights.items():
        if name in means:
            total = total + weight * means[name]
    return total


def _find_scenes(
    session: Session, stage: str, users: np.ndarray | None, positions: np.ndarray | None
) -> tuple[SceneSetup | None, np.ndarray | None]:
    """Return the scenes of a stage and the scene of each prompt [P]; both are None if the stage has no named scenes."""
    stage_options = session.scenario.stages[stage]
    setup: SceneSetup | None = stage_options.kind.make_scenes(stage_options)
    if setup is None or not setup.names:
        return None, None
    return setup, session.rollout.group.find_scenes(stage, users, positions).get(session.deadlines.step)


def score_validation(session: Session, stage: str, done: int) -> dict[str, float]:
    """Score the lists that validation prompts would be served, at the start of a stage and at its validation points.

    Lists and scores are stored in `session.validation` for that step. Until the next validation, the scores also determine
    the ratios by which floors are applied (`RewardObjectives`).

    Returns:
        The trained reward and the mean of each reward, as metrics; empty after all other steps, and if the stage neither
        selects by reward nor has floors.
    """
    validation, objectives = session.validation, session.objectives
    if validation is None or objectives is None or (done and done not in validation.points):
        return {}
    if not (validation.rule.reward or objectives.has_floors) or str(done) in validation.record.rewards:
        return {}
    users, positions = session.rollout.group.draw_validation_prompts(_VALIDATION_PROMPTS).get(
        session.deadlines.step
    )
    if not len(users):
        return {}
    call_size = session.stages[stage].users
    slices = [slice(start, start + call_size) for start in range(0, len(users), call_size)]
    requests = [
        PromptRequest(stage, step=0, users=users[rows], positions=positions[rows], served=True)
        for rows in slices
    ]
    validation.served[done] = [session.rollout.generate(request) for request in requests]
    by_scene = score_served(session, stage, done)
    means = {name: float(sum(values)) for name, values in by_scene.items()}
    objectives.note_served(means)
    weight_step = min(done, session.stages[stage].steps - 1)
    stage_options = session.scenario.stages[stage]
    total = objectives.compute_total(by_scene, weight_step, stage_options.kind.make_scenes(stage_options))
    assert total is not None, "every current reward was computed"
    validation.record.add_rewards(done, total, objectives.compute_shortfall(means), by_scene)
    return {"validation reward": total} | {f"validation reward.{name}": mean for name, mean in means.items()}


def score_served(
    session: Session, stage: str, step: int, names: Collection[str] | None = None
) -> dict[str, list[float]]:
    """Score the lists that `score_validation` has stored for a step, and return sums by scene.

    Args:
        session: The session, whose validation holds the lists of the step.
        stage: The RL stage.
        step: The step of the stage after which the lists were generated.
        names: The names of the rewards to compute; by default all current rewards.

    Returns:
        The contribution of each scene's lists to the mean of each reward.
    """
    assert session.validation is not None
    rewards, means = session.reward, {}
    for beams in session.validation.served[step]:
        for name, values in rewards.compute_means(rewards.score(beams, names=names, step=-1)).items():
            means.setdefault(name, []).append(values)
    means = {name: np.concatenate(parts) for name, parts in means.items()}
    users, positions = session.rollout.group.draw_validation_prompts(_VALIDATION_PROMPTS).get(
        session.deadlines.step
    )
    setup, scene = _find_scenes(session, stage, users, positions)
    is_measured_P = ~np.any([np.isnan(values) for values in means.values()], axis=0)
    count = 1 if setup is None else len(setup.names) + 1
    return {name: sum_by_scene(values, is_measured_P, scene, count) for name, values in means.items()}


def rescore_candidates(session: Session, stage: str, recorder: Recorder) -> None:
    """Score the lists of earlier validations with rewards that were attached later, and recompute all trained rewards.

    The lists of a step are lost if the run was resumed after it. Such a step cannot be selected while a reward that has not
    scored them has a weight.
    """
    validation, objectives = session.validation, session.objectives
    if validation is None or objectives is None or not validation.record.rewards:
        return
    lost_steps = []
    for step_text, entry in validation.record.rewards.items():
        missing = objectives.rewards.keys() - entry["parts"].keys()
        if not missing:
            continue
        if int(step_text) in validation.served:
            entry["parts"] |= score_served(session, stage, int(step_text), missing)
        else:
            lost_steps.append(step_text)
    if lost_steps:
        text = (
            f"{stage}: steps {', '.join(lost_steps)} cannot be selected: their lists are lost, so rewards that were attached "
            "later cannot score them"
        )
        recorder.add_event("note", text=text)
    recompute_rewards(session)


def probe_prompts(session: Session, name: str, size: int) -> Iterator[PromptRequest]:
    """Yield requests for the held-out prompts on which the rewards of a stage are compared.

    At least one request is yielded; without held-out users, it has no prompts.

    Args:
        session: The session.
        name: The RL stage.
        size: The largest number of prompts of a request.
    """
    stage_options = session.scenario.stages[name]
    max_prompts = getattr(stage_options, "probe", None)
    users, positions = session.rollout.group.draw_held_out_prompts(max_prompts).get(session.deadlines.step)
    for start in range(0, max(1, len(users)), size):
        part = slice(start, start + size)
        yield PromptRequest(name, step=0, users=users[part], positions=positions[part], served=True)
