"""From a scenario to what workers are told: plain setups, nothing of the scenario itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nonet.controller.plan import largest_chunk, model_size
from nonet.controller.record import RunFolder
from nonet.controller.scenario import (
    Scenario,
    Schedule,
    table_arguments,
    tier_arguments,
)
from nonet.controller.setup.own_files import read_copies
from nonet.deadlines import Deadlines
from nonet.workers.roles import RunSetup, StageSetup
from nonet.workers.runtime import RoleSpec


def run_setup(scenario: Scenario) -> RunSetup:
    """Seed, history, model, tables and features."""
    tables, features = {}, {}
    defaults = scenario.sparse.defaults
    for name, table in scenario.sparse.tables.items():
        tables[name] = table_arguments(defaults, table)
        for feature in table.features or [name]:
            features[feature] = name
    return RunSetup(
        scenario.seed,
        scenario.data.history,
        model_options(scenario),
        tables,
        features,
        {name: table.combiner for name, table in scenario.sparse.tables.items() if table.combiner},
        scenario.sparse.in_flight,
        {name: tier_arguments(table.tiers) for name, table in scenario.sparse.tables.items() if table.tiers},
        deadlines(scenario),
    )


def deadlines(scenario: Scenario) -> Deadlines:
    """How long the run's waits may take."""
    return Deadlines.of(scenario.deadlines.model_dump())


def model_options(scenario: Scenario) -> dict[str, Any]:
    """What `build_model` takes; HSTU's blocks are built for histories of this length and the start before them."""
    options = {"use": scenario.model.use, **scenario.model.options()}
    return options | {"length": scenario.data.history + 1} if options.get("block") == "hstu" else options


def predicts_clicks(scenario: Scenario) -> bool:
    """Whether the model answers how likely an event is liked, instead of which comes next."""
    return scenario.model.use == "deepfm"


def baselines_of(scenario: Scenario) -> tuple[str, ...]:
    """The names of what the model is measured against."""
    from nonet.models import BASELINES
    from nonet.models.click import CLICK_BASELINES

    return CLICK_BASELINES if predicts_clicks(scenario) else tuple(BASELINES)


def targets(scenario: Scenario) -> dict[str, str]:
    """Stage -> target condition."""
    return {
        name: target for name, body in scenario.stages.items() if (target := getattr(body, "target", None))
    }


def reward_options(scenario: Scenario) -> Iterator[tuple[str, str, Any]]:
    """(stage, name, options) of every reward."""
    for stage, body in scenario.stages.items():
        for name, options in getattr(body, "rewards", {}).items():
            yield stage, name, options


def rollout_options(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """How each stage that rolls out does so."""
    return {
        name: body.kind.rollout_options(body) for name, body in scenario.stages.items() if body.kind.rolls_out
    }


def role_specs(scenario: Scenario, run: RunFolder, evaluate: Any) -> dict[str, RoleSpec]:
    """How every role of the plan is made; `file.py` references are the copies that the run keeps.

    Raises ConfigError where one of them was changed.
    """
    from nonet.workers.roles import EmbeddingShard, Evaluator, RewardWorker, Rollout, Tokeniser, Trainer

    setup, copies = run_setup(scenario), read_copies(run)
    specs = {
        "trainer": RoleSpec(Trainer, (setup,)),
        "rollout": RoleSpec(Rollout, (setup,)),
        "embedding": RoleSpec(EmbeddingShard, (setup,)),
        "evaluator": RoleSpec(Evaluator, (setup, evaluate)),
        "tokenise": RoleSpec(Tokeniser),
    }
    if predicts_clicks(scenario):
        from nonet.workers.roles.click import ClickEvaluator, ClickTokeniser, ClickTrainer, Idle

        specs["trainer"], specs["rollout"] = RoleSpec(ClickTrainer, (setup,)), RoleSpec(Idle)
        specs["evaluator"] = RoleSpec(ClickEvaluator, (setup, evaluate))
        specs["tokenise"] = RoleSpec(ClickTokeniser)
    for stage, name, options in reward_options(scenario):
        specs[f"{stage}.reward.{name}"] = RoleSpec(
            RewardWorker, (name, copies.address(options.use or name), str(run.sources), options.options())
        )
    return specs


def stage_setups(
    scenario: Scenario,
    users: int,
    events: int,
    chunks: Mapping[str, int | None] | None = None,
    first: int = 0,
) -> dict[str, StageSetup]:
    """Every stage with its number of steps, known once the sequences are: `users` rows, `events` trained events.

    `chunks` is what a plan says a trainer computes at once, by stage; by default what the scenario says. `first`: the
    global step that the run starts at, which is that of the commit it goes on from.
    """
    setups: dict[str, StageSetup] = {}
    users = events if predicts_clicks(scenario) else users  # a click model's row is an event
    base = _rate(next(iter(scenario.stages.values())).lr)["peak"]
    for name, body in scenario.stages.items():
        lengths = body.kind.lengths(body, users, events)
        chunk = (chunks or {}).get(name) or largest_chunk(scenario, body, model_size(scenario))
        setups[name] = StageSetup(
            name=name,
            first=first,
            lr=_rate(body.lr),
            base=base,
            chunk=chunk,
            rolls_out=body.kind.rolls_out,
            phases=body.kind.trainer_phases,
            **lengths,
        )
        first += setups[name].steps
    return {
        name: replace(setup, target=name if name in targets(scenario) else None)
        for name, setup in setups.items()
    }


def _rate(lr: float | Schedule) -> Mapping[str, Any]:
    return lr.model_dump() if isinstance(lr, Schedule) else {"peak": lr}
