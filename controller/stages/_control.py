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
from nonet.storage import fetch, remove
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture

_ROLLOUT_FLOPS, _UPDATE_FLOPS, _REFERENCE_FLOPS = 2.0, 6.0, 2.0  # per parameter and position
_PATIENCE = 3  # validations without an improvement, after which a control stops


@dataclass(frozen=True, slots=True)
class Control:
    """The training of one control: its setup, its first checkpoint and its validation.

    Attributes:
        setup: The setup of the stage as which it is trained, named after the control.
        start: The folder of the checkpoint from which it starts, which is a candidate too.
        rule: The rule by which it is validated.
        measure: "passes" if it makes as many passes over the events as RL, "compute" if it uses as much computation.
    """

    setup: StageSetup
    start: Path
    rule: ValidationRule
    measure: str


def make_controls(session: Session, name: str) -> list[Control]:
    """Return the controls of an RL stage; none if the scenario disables them, or if no supervised stage came before it."""
    stage_options, found = session.scenario.stages[name], _find_supervised_stage(session, name)
    options = getattr(stage_options, "control", False)
    if not options or found is None or not session.stages[name].steps:
        return []
    source_scenario, supervised_stage, start = found
    facts = session.facts["data"]
    setup = make_stage_setups(source_scenario, facts["users"], facts["trained_events"])[supervised_stage]
    rule = make_validation_rule(source_scenario, supervised_stage) or ValidationRule("ndcg@10")
    rl_stage = session.stages[name]
    peak_lr = getattr(options, "lr", None)
    # Steps have at least as many users as those of RL, because smaller steps take up to four times as long in total.
    users = min(max(setup.users, rl_stage.users), facts["users"])
    setup = replace(
        setup,
        first=rl_stage.first,
        users=users,
        target=None,
        rl_targets=True,
        frozen_rows=rl_stage.sparse_lr is None,
        lr=setup.lr if peak_lr is None else setup.lr.model_copy(update={"peak": peak_lr}),
    )
    controls = []
    for title, measure, steps in (
        (make_passes_name(name), "passes", max(1, round(rl_stage.steps * rl_stage.users / users))),
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
        The folder of its best checkpoint; None if the user requested a stop, after which it must start again. The trainer
        holds the weights of the last step.
    """
    setup, control_dir = control.setup, session.run.path / "controls" / control.setup.name
    remove(control_dir, "the control starts again")
    session.trainer.ensure_on_device(setup)
    session.load(control.start)
    session.trainer.begin(setup)
    recorder.begin(setup.name, setup.steps, 0)
    validation_steps = control.rule.list_validation_steps(setup.steps, setup.epochs)
    validation = _ControlValidation(session, control.rule)
    validation.request(setup.name, step=0, folder=control.start)
    for step in range(0, setup.steps, CHUNK_STEPS):
        if stopped():
            return None
        chunk_end = min(step + CHUNK_STEPS, setup.steps)
        began = time.perf_counter()
        records = session.trainer.train(setup, step, chunk_end)
        events = sum(record["events"] for record in records)
        shown = {"loss": sum(record["loss"] * record["events"] for record in records) / max(1.0, events)}
        shown |= {"lr": records[-1]["lr"], "rows/s": events / (time.perf_counter() - began)}
        recorder.record_step(setup.name, chunk_end, shown)
        if any(step < point <= chunk_end for point in validation_steps):
            validation.request(
                setup.name,
                chunk_end,
                session.checkpoint_writer.save_to_folder(control_dir / f"step-{chunk_end:06d}"),
            )
            if validation.should_stop():
                break
    step, folder, best_value = validation.find_best()
    if not step:
        folder = control_dir / "step-000000"
        fetch(control.start)
        shutil.copytree(control.start, folder)
    for other in control_dir.iterdir():
        if other != folder:
            remove(other, "not the best step of the control")
    session.checkpoint_log.store_changes()
    outcome = f"best at step {step} of {setup.steps}" if step else f"no step of {setup.steps} beat its start"
    text = f"{setup.name}: finetuning continued on RL's events with as much {control.measure}, {outcome}"
    recorder.add_event("note", text=f"{text} by {control.rule.metric} of validation ({best_value:.4f})")
    return folder


class _ControlValidation:
    """The validation results of a control's checkpoints, in the order of their requests."""

    def __init__(self, session: Session, rule: ValidationRule):
        self._session, self._rule = session, rule
        self._requests: list[tuple[int, Path, GroupFuture]] = []
        self._values: list[float] = []

    def request(self, name: str, step: int, folder: Path) -> None:
        """Request the validation of a checkpoint, without waiting for it."""
        self._requests.append((step, folder, self._session.evaluator.validate(name, str(folder))))

    def should_stop(self) -> bool:
        """Wait for all results but the newest, and return whether the control should stop by them."""
        self._settle(len(self._requests) - 1)
        return self._rule.should_stop(self._values)

    def find_best(self) -> tuple[int, Path, float]:
        """Wait for all validations, and return (step, folder, value) of the best checkpoint."""
        self._settle(len(self._requests))
        index = self._rule.find_best(self._values) or 0
        return *self._requests[index][:2], self._values[index]

    def _settle(self, count: int) -> None:
        """Wait for the first `count` results, and store their values."""
        for _, _, future in self._requests[len(self._values) : count]:
            self._values.append(self._get_value(future.get(self._session.deadlines.evaluate)))

    def _get_value(self, answer: Mapping[str, Any]) -> float:
        """Return the value of the rule's metric in a result; NaN if the result lacks it."""
        selects_by_nats = self._rule.metric == "nats"
        value = answer["nats"] if selects_by_nats else answer["metrics"].get(self._rule.metric)
        return float("nan") if value is None else value


def _find_supervised_stage(session: Session, name: str) -> tuple[Scenario, str, Path] | None:
    """Return the scenario and the name of the last supervised stage before an RL stage, and the checkpoint RL started from.

    If the RL stage is the first one of the run, that is a stage of the run from which this one was initialised.
    """
    names = list(session.stages)
    earlier_stages = names[: names.index(name)]
    start, source = find_stage_start(session, name), session.scenario
    if start is None:
        return None
    if not earlier_stages:
        init = session.scenario.init
        try:
            source, _ = load_scenario(find_run(init.source if init else "").scenario)
        except ConfigError:  # that run has been deleted, or cannot be read
            return None
        source_stages = list(source.stages)
        earlier_stages = source_stages[: source_stages.index(session.facts["init"]["stage"]) + 1]
    supervised_stages = [stage for stage in earlier_stages if source.stages[stage].kind.validates]
    return (source, supervised_stages[-1], start) if supervised_stages else None


def _count_steps(session: Session, name: str, users: int) -> int:
    """Return how many steps of `users` users compute as much as the RL stage does in rollouts, updates and its reference."""
    scenario, stage_options, rl_setup = session.scenario, session.scenario.stages[name], session.stages[name]
    size, facts = derive_model_size(scenario), session.facts["data"]
    mean_events = min(scenario.data.history, facts["trained_events"] / max(1, facts["users"]))
    history_positions = 1 + mean_events * size.positions_an_event
    update_passes = int(rl_setup.algorithm.get("epochs", 1))
    reference_flops = _REFERENCE_FLOPS if stage_options.kind.needs_reference(stage_options) else 0.0
    prompt_flops = (history_positions + stage_options.kind.get_width(stage_options) * size.levels) * (
        _ROLLOUT_FLOPS + update_passes * (_UPDATE_FLOPS + reference_flops)
    )
    return max(
        CHUNK_STEPS,
        round(rl_setup.steps * rl_setup.users * prompt_flops / (_UPDATE_FLOPS * users * history_positions)),
    )
