"""What this version can plan but not yet run, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nonet.controller.scenario.options import Chunk, Elastic, Reinforced, RewardOptions, Role
from nonet.controller.scenario.scenario import Scenario
from nonet.errors import ConfigError
from nonet.plugins import is_reference
from nonet.suggest import did_you_mean

_ROLES = ("trainer", "rollout", "embedding", "evaluator")


def check_runnable(scenario: Scenario) -> None:
    """Raises ConfigError that lists every key that can only be planned."""
    missing = list(_missing(scenario))
    if missing:
        raise ConfigError(
            f"{scenario.name}: this version plans but does not run {'; '.join(missing)}. `nonet plan` still works."
        )


def roles_not_run(scenario: Scenario) -> tuple[str, ...]:
    """Roles that a plan places and no run starts: steps between rollout and rewards, rewards elsewhere, roles of your own."""
    own = [name for name in scenario.roles if name not in _ROLES]
    for stage, body in scenario.stages.items():
        own += [name for name in body.roles if name not in _ROLES]
        if isinstance(body, Reinforced):
            own += [f"{stage}.between.{index}" for index in range(len(body.between))]
            own += [
                f"{stage}.reward.{name}"
                for name, reward in body.rewards.items()
                if next(_missing_reward("", reward), None)
            ]
    return tuple(dict.fromkeys(own))


def _missing(scenario: Scenario) -> Iterator[str]:
    data = scenario.data
    if scenario.storage:
        yield "storage (runs live in a local folder)"
    if data.events:
        yield "data.events.compress"
    if data.join:
        yield "data.join"
    if scenario.model.use not in ("sid_decoder", "deepfm"):
        yield f"model.use: {scenario.model.use}"
    if is_reference(str(scenario.tokenizer.use)):
        yield f"tokenizer.use: {scenario.tokenizer.use}"
    yield from _missing_roles("roles", scenario.roles)
    if scenario.evaluate.every:
        yield "evaluate.every"
    if scenario.checkpoint.keep.best:
        yield "checkpoint.keep.best"
    for name, stage in scenario.stages.items():
        yield from _missing_roles(f"stages.{name}.roles", stage.roles)
        if scenario.model.use == "deepfm" and stage.chunk != Chunk():
            yield f"stages.{name}.chunk for deepfm (its step is one batch of events)"
        if isinstance(stage, Reinforced) and scenario.model.use == "deepfm":
            yield f"stages.{name} with rewards for deepfm, which makes no lists"
        elif isinstance(stage, Reinforced):
            yield from _missing_rl(f"stages.{name}", stage)


def _missing_roles(path: str, roles: Mapping[str, Role]) -> Iterator[str]:
    for name, role in roles.items():
        if role.engine and role.engine.use != "ddp":
            yield f"{path}.{name}.engine: {role.engine.use}"
        if (
            name == "evaluator"
            and (role.workers.max if isinstance(role.workers, Elastic) else role.workers) > 1
        ):
            yield f"{path}.{name}.workers above 1 (one of them ranks)"
        if name not in _ROLES:
            near = did_you_mean(name, _ROLES)
            yield f"{path}.{name} (roles of your own: write a nonet.Session loop.{near})"


def _missing_rl(path: str, stage: Reinforced) -> Iterator[str]:
    if stage.between:
        yield f"{path}.between"
    if stage.mismatch:
        yield f"{path}.mismatch"
    options = stage.rollout.options()
    if options.get("catalogue"):
        yield f"{path}.rollout.catalogue"
    if options.get("staleness"):
        yield f"{path}.rollout.staleness above 0"
    for use, where in ((stage.algorithm.use, "algorithm"), (stage.rollout.use, "rollout")):
        if is_reference(str(use)):
            yield f"{path}.{where}.use: {use}"
    for name, reward in stage.rewards.items():
        yield from _missing_reward(f"{path}.rewards.{name}", reward)


def _missing_reward(path: str, reward: RewardOptions) -> Iterator[str]:
    if isinstance(reward.use, str) and "://" in reward.use:
        yield f"{path}.use: {reward.use}"
    if reward.at_least is not None:
        yield f"{path}.at_least"
