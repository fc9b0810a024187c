"""What this version can plan but not yet run, said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nonet.controller.scenario.options import Elastic, Role
from nonet.controller.scenario.scenario import Scenario
from nonet.controller.scenario.stage import Chunk
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
        own += [each.name for each in body.kind.own_workers(stage, body) if not each.runs]
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
        if stage.kind.rolls_out and scenario.model.use == "deepfm":
            yield f"stages.{name} with rewards for deepfm, which makes no lists"
        else:
            yield from stage.kind.unsupported(f"stages.{name}", stage)


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
