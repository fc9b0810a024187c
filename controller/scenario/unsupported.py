"""What is refused before anything starts: keys that this version plans but does not run, and verbs that a run does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.cluster import Elastic, Pool
from nonet.controller.scenario.roles import Role
from nonet.controller.scenario.scenario import Scenario
from nonet.errors import ConfigError
from nonet.models import Model
from nonet.suggest import suggest_sentence
from nonet.verbs import VERBS, SupportedVerbs
from nonet.workers.roles import Weights
from nonet.workers.roles.kinds import get_shipped_roles


def check_runnable(scenario: Scenario) -> None:
    """Check that this version can run every key of a scenario.

    Raises:
        ConfigError: Some keys can only be planned; the message lists them.
    """
    unsupported = list(_find_unsupported(scenario))
    if unsupported:
        raise ConfigError(
            f"{scenario.name}: this version plans but does not run {'; '.join(unsupported)}. `nonet plan` still works."
        )


def list_unsupported_roles(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of roles and stages' own groups that a plan places but no run starts."""
    names = [name for name, role in scenario.roles.items() if not _has_kind(name, role)]
    for stage_name, stage in scenario.stages.items():
        names += [name for name, role in stage.roles.items() if not _has_kind(name, role)]
        own_workers = stage.kind.list_own_workers(stage_name, stage)
        names += [workers.name for workers in own_workers if not workers.runs]
    return tuple(dict.fromkeys(names))


def _find_unsupported(scenario: Scenario) -> Iterator[str]:
    """Yield every key that can only be planned, with its value or a remark in parentheses."""
    data = scenario.data
    if scenario.storage:
        yield "storage (runs are stored in a local folder)"
    if scenario.weights.shard != Weights().shard and not scenario.model.spec.makes_lists:
        yield f"weights.shard with model.use: {scenario.model.use}"
    if data.join and not data.source.spec.targets:
        yield f"data.join with data.source: {data.source.use}"
    if not scenario.model.spec.runs:
        yield f"model.use: {scenario.model.use}"
    yield from _find_unsupported_roles("roles", scenario.roles, scenario)
    yield from _find_unsupported_evaluators("roles", scenario.roles, scenario.model)
    for name, stage in scenario.stages.items():
        yield from _find_unsupported_roles(f"stages.{name}.roles", stage.roles, scenario)
        yield from _find_unsupported_evaluators(f"stages.{name}.roles", stage.roles, scenario.model)
        if getattr(stage, "target", None) and not data.source.spec.targets:
            yield f"stages.{name}.target with data.source: {data.source.use}"
        for key in ("weight", "propensity"):
            if getattr(stage, key, None) and not data.source.spec.weights:
                yield f"stages.{name}.{key} with data.source: {data.source.use}"
        engine = scenario.roles["trainer"].engine if "trainer" in scenario.roles else None
        if engine is not None and stage.optimizer.use not in engine.spec.optimizers:
            supported = " or ".join(engine.spec.optimizers)
            yield f"stages.{name}.optimizer: {stage.optimizer.use} with engine {engine.use} (set optimizer: {{use: {supported}}})"
        if stage.kind.aligns and not scenario.model.spec.aligns:
            yield f"stages.{name}.use: {stage.use} with model.use: {scenario.model.use} (it has no words)"
        if stage.kind.rolls_out and (stage.precision.use != "fp32" or stage.optimizer.clip_rows):
            key = "precision" if stage.precision.use != "fp32" else "optimizer.clip_rows"
            yield f"stages.{name}.{key} in a stage that rolls out"
        yield from stage.kind.find_unsupported(f"stages.{name}", stage)
    yield from scenario.model.spec.find_unsupported(scenario)


def _find_block_option(options: Mapping[str, Any]) -> str | None:
    """Return the first option that is set of those that need a model made of blocks; None if none is set.

    Args:
        options: The options of an engine.
    """
    return next((key for key in ("recompute", "compile") if options.get(key)), None)


def _find_engine_limit(role: Role, scenario: Scenario) -> str | None:
    """Return what a role's engine does not support on the role's device and ranks; None if it supports everything."""
    if role.engine is None:
        return None
    host = role  # the role whose pool the role uses
    for name in (role.fuse, role.collocate):
        host = scenario.roles.get(name, host) if name else host
    pool = scenario.pools.get(host.pool or "cpu", Pool())
    ranks = role.workers.min if isinstance(role.workers, Elastic) else role.workers
    return role.engine.spec.unsupported(role.engine.get_options(), pool.device, ranks)


def _find_unsupported_roles(path: str, roles: Mapping[str, Role], scenario: Scenario) -> Iterator[str]:
    """Yield the keys of roles that can only be planned.

    Args:
        path: The path of the roles in the scenario.
        roles: The roles, by name.
        scenario: The scenario.
    """
    has_blocks = scenario.model.spec.blocks
    for name, role in roles.items():
        if role.engine and (path, name) != ("roles", "trainer"):
            yield f"{path}.{name}.engine (a run has one engine: roles.trainer.engine)"
        elif role.engine and not role.engine.spec.runs:
            yield f"{path}.{name}.engine: {role.engine.use}"
        elif role.engine and not has_blocks and (key := _find_block_option(role.engine.get_options())):
            yield f"{path}.{name}.engine.{key} with a model that has no blocks"
        elif role.engine and (limit := _find_engine_limit(role, scenario)):
            yield f"{path}.{name}.engine: {role.engine.use} with {limit}"
        if not _has_kind(name, role):
            suggestion = suggest_sentence(name, get_shipped_roles())
            yield f"{path}.{name} (a role of your own must name its kind, use: file.py:SPEC.{suggestion})"


def _find_unsupported_evaluators(path: str, roles: Mapping[str, Role], model: Model) -> Iterator[str]:
    """Yield `evaluator.workers` if it is elastic, or above 1 for a model with its own evaluator.

    Args:
        path: The path of the roles in the scenario.
        roles: The roles, by name.
        model: The model.
    """
    role = roles.get("evaluator")
    if role is None:
        return
    elastic = role.workers if isinstance(role.workers, Elastic) else None
    if elastic is not None and elastic.max > 1:
        yield f"{path}.evaluator.workers from {elastic.min} to {elastic.max} (give one number)"
    elif role.workers != 1 and "evaluator" in model.spec.roles:
        yield f"{path}.evaluator.workers above 1 with model.use: {model.use}"


def _has_kind(name: str, role: Role) -> bool:
    """Return whether a role names its kind or has the name of a shipped one."""
    return role.use is not None or name in get_shipped_roles()


def check_supported(scenario: Scenario, verb: str, run_name: str) -> None:
    """Check that a verb works for the runs of a scenario, as the kinds of its parts declare it.

    Args:
        scenario: The scenario, or that of a run.
        verb: One of `nonet.verbs.VERBS`.
        run_name: The name of the scenario or run, for the error.

    Raises:
        ConfigError: The verb does not work; the message has the reason and the next step.
    """
    if limit := find_verb_limit(scenario, verb):
        raise ConfigError(f"{verb}: {run_name} {limit}")


def find_verb_limit(scenario: Scenario, verb: str) -> str | None:
    """Return why a verb does not work for the runs of a scenario, as what follows the name of the run; None if it works.

    Args:
        scenario: The scenario.
        verb: One of `nonet.verbs.VERBS`.
    """
    for part, supported in _list_declarations(scenario):
        if limit := supported.find_limit(verb):
            return f"{part}, which {limit}"
    stage_limits = {name: stage.kind.verbs.find_limit(verb) for name, stage in scenario.stages.items()}
    if not stage_limits or not all(
        stage_limits.values()
    ):  # one stage that has a part in the verb is sufficient
        return None
    name, limit = stage_limits.popitem()
    return f"has stages.{name}, which {limit}"


def list_missing_verbs(scenario: Scenario) -> dict[str, list[str]]:
    """Return the verbs that the runs of a scenario do not have because of a part other than their stages, by reason."""
    missing: dict[str, list[str]] = {}
    for part, supported in _list_declarations(scenario):
        for verb in VERBS:
            if limit := supported.find_limit(verb):
                missing.setdefault(f"{part}, which {limit}", []).append(verb)
    return missing


def _list_declarations(scenario: Scenario) -> Iterator[tuple[str, SupportedVerbs]]:
    """Yield the parts of a scenario, as what follows the name of a run, with the verbs that they support."""
    trainer = scenario.roles.get("trainer")
    parts = {"model": scenario.model, "data.source": scenario.data.source, "tokenizer": scenario.tokenizer}
    for key, part in (parts | {"roles.trainer.engine": trainer and trainer.engine}).items():
        if part is not None:
            yield f"has {key}.use: {part.use}", part.spec.verbs
