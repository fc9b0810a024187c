"""The controls of an RL stage: continued finetuning from the same checkpoint on the events that RL learns from.

There are two. One makes as many passes over these events as RL does, the other uses as much computation as RL did. Both have
the learning rate of the scenario (`control: {lr}`), and train sparse rows if RL does. Each is validated like finetuning, with
its first checkpoint as a candidate, and its best checkpoint is evaluated like that of RL. The comparison separates the gain
from more events from the gain from rewards. The checkpoints are in RUN/controls, and no later stage continues from them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nonet.controller.plan import derive_model_size
from nonet.controller.record import Recorder, find_run, make_control_name, make_passes_name
from nonet.controller.scenario import Scenario, ValidationRule, load_scenario, make_validation_rule
from nonet.controller.session import Session, find_stage_start
from nonet.controller.setup import make_stage_setups
from nonet.controller.stages.supervised import CHUNK_STEPS
from nonet.errors import ConfigError
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture

_DECODE, _TRAIN, _LOOK = 2.0, 6.0, 2.0  # flops a parameter and position: a rollout, a step, a reference
_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class Control:
    """What is trained, from which checkpoint, and how it is validated.

    Attributes:
        setup: The stage as trainers train it; its name is the control's.
        start: The checkpoint that it begins from, which is a candidate too.
        rule: How it is validated.
        measure: What it has as much of as RL: "passes" or "compute".
    """

    setup: StageSetup
    start: Path
    rule: ValidationRule
    measure: str


def make_controls(session: Session, name: str) -> list[Control]:
    """Return the controls of an RL stage: none where it wants none, or no supervised stage came before it."""
    stage_options, source_stage = session.scenario.stages[name], _find_supervised_stage(session, name)
    options = getattr(stage_options, "control", False)
    if not options or source_stage is None or not session.stages[name].steps:
        return []
    source, supervised, start = source_stage
    facts = session.facts["data"]
    setup = make_stage_setups(source, facts["users"], facts["trained_events"])[supervised]
    rl, rule = session.stages[name], make_validation_rule(source, supervised) or ValidationRule("ndcg@10")
    rate = getattr(options, "lr", None)
    # RL's steps, or larger ones: small ones cost four times the wall.
    users = min(max(setup.users, rl.users), facts["users"])
    setup = replace(
        setup,
        first=rl.first,
        users=users,
        target=None,
        rl_targets=True,
        frozen_rows=rl.sparse_lr is None,
        lr=setup.lr if rate is None else setup.lr.model_copy(update={"peak": rate}),
    )
    controls = []
    for title, measure, steps in (
        (make_passes_name(name), "passes", max(1, round(rl.steps * rl.users / users))),
        (make_control_name(name), "compute", _count_steps(session, name, users)),
    ):
        control_setup = replace(setup, name=title, steps=steps, epochs=steps * users / max(1, facts["users"]))
        controls.append(Control(control_setup, start, replace(rule, patience=_PATIENCE, every=None), measure))
    return controls


def train_control(
    session: Session, control: Control, recorder: Recorder, stopped: Callable[[], bool]
) -> Path | None:
    """Train a control.

    Returns:
        The folder of its best checkpoint; None when asked to stop: it begins again then. The trainer is left with its weights.
    """
    setup, top = control.setup, session.run.path / "controls" / control.setup.name
    shutil.rmtree(top, ignore_errors=True)
    session.trainer.ensure_on_device(setup)
    session.groups.load(control.start, None)
    session.trainer.begin(setup)
    recorder.begin(setup.name, setup.steps, 0)
    points = control.rule.list_validation_steps(setup.steps, setup.epochs)
    validation = _ControlValidation(session, control.rule)
    validation.request(setup.name, 0, control.start)
    for step in range(0, setup.steps, CHUNK_STEPS):
        if stopped():
            return None
        stop = min(step + CHUNK_STEPS, setup.steps)
        began = time.perf_counter()
        records = session.trainer.train(setup, step, stop)
        events = sum(record["events"] for record in records)
        shown = {"loss": sum(record["loss"] * record["events"] for record in records) / max(1.0, events)}
        shown |= {"lr": records[-1]["lr"], "rows/s": events / (time.perf_counter() - began)}
        recorder.record_step(setup.name, stop, shown)
        if any(step < point <= stop for point in points):
            validation.request(
                setup.name, stop, session.checkpoint_writer.save_to_folder(top / f"step-{stop:06d}")
            )
            if validation.should_stop():
                break
    step, folder, value = validation.find_best()
    if not step:
        folder = top / "step-000000"
        shutil.copytree(control.start, folder)
    for other in top.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    best = f"best at step {step} of {setup.steps}" if step else f"no step of {setup.steps} beat its start"
    text = f"{setup.name}: finetuning continued on RL's events with as much {control.measure}, {best}"
    recorder.add_event("note", text=f"{text} by {control.rule.metric} of validation ({value:.4f})")
    return folder


class _ControlValidation:
    """The validation results of a control's checkpoints."""

    def __init__(self, session: Session, rule: ValidationRule):
        self._session, self._rule = session, rule
        self._requests: list[tuple[int, Path, GroupFuture]] = []
        self._values: list[float] = []

    def request(self, name: str, step: int, folder: Path) -> None:
        self._requests.append((step, folder, self._session.evaluator.validate(name, str(folder))))

    def should_stop(self) -> bool:
        """Return whether the control should stop, by all results but the newest, which may not be available yet."""
        self._settle(len(self._requests) - 1)
        return self._rule.should_stop(self._values)

    def find_best(self) -> tuple[int, Path, float]:
        """Wait for all validations, and return (step, folder, value) of the best checkpoint."""
        self._settle(len(self._requests))
        index = self._rule.find_best(self._values) or 0
        return *self._requests[index][:2], self._values[index]

    def _settle(self, count: int) -> None:
        for _, _, future in self._requests[len(self._values) : count]:
            self._values.append(self._get_value(future.get(self._session.deadlines.evaluate)))

    def _get_value(self, answer: Mapping[str, Any]) -> float:
        nats = self._rule.metric == "nats"
        value = answer["nats"] if nats else answer["metrics"].get(self._rule.metric)
        return float("nan") if value is None else value


def _find_supervised_stage(session: Session, name: str) -> tuple[Scenario, str, Path] | None:
    """Return the last supervised stage before an RL stage, its scenario, and the checkpoint that RL began from."""
    names = list(session.stages)
    earlier = names[: names.index(name)]
    start, source = find_stage_start(session, name), session.scenario
    if start is None:
        return None
    if not earlier:
        init = session.scenario.init
        try:
            source, _ = load_scenario(find_run(init.source if init else "").scenario)
        except ConfigError:  # the source is gone; its checkpoint is what the run began with
            return None
        named = list(source.stages)
        earlier = named[: named.index(session.facts["init"]["stage"]) + 1]
    supervised = [each for each in earlier if source.stages[each].kind.validates]
    return (source, supervised[-1], start) if supervised else None


def _count_steps(session: Session, name: str, users: int) -> int:
    """Return the number of steps of `users` users that compute as much as the RL stage: rollouts, updates and its reference."""
    scenario, stage_options, rl = session.scenario, session.scenario.stages[name], session.stages[name]
    size, facts = derive_model_size(scenario), session.facts["data"]
    mean = min(scenario.data.history, facts["trained_events"] / max(1, facts["users"]))
    history = 1 + mean * size.positions_an_event
    passes = int(rl.algorithm.get("epochs", 1))
    looks = _LOOK if stage_options.kind.needs_reference(stage_options) else 0.0
    prompt = (history + stage_options.kind.get_width(stage_options) * size.levels) * (
        _DECODE + passes * (_TRAIN + looks)
    )
    return max(CHUNK_STEPS, round(rl.steps * rl.users * prompt / (_TRAIN * users * history)))
