"""The checkpoints that a run or a stage begins and ends with.

A resumed run begins with its newest checkpoint. A stage begins with the checkpoint that ended the stage before it, and
ends with the checkpoint that its validations select.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.atomic import make_folder
from nonet.controller.record import Manifest, ValidationRecord, make_unselected_name
from nonet.controller.scenario import REWARD, make_validation_rule
from nonet.controller.session.artifacts import list_artifact_hashes
from nonet.controller.session.checkpoint_writer import CheckpointWriter
from nonet.controller.session.stage_validation import StageValidation
from nonet.deadlines import Deadline
from nonet.errors import CheckpointError
from nonet.storage import fetch, remove
from nonet.workers.roles import StageSetup, make_ranks_name

if TYPE_CHECKING:
    from nonet.controller.session.running_session import RunningSession


def restore_checkpoint(session: RunningSession, path: Path, manifest: Manifest) -> None:
    """Load the checkpoint of a folder, and delete the checkpoints, results and records that came after it.

    Raises:
        CheckpointError: The checkpoint was trained from other artifacts.
    """
    if manifest.artifacts != list_artifact_hashes(session.facts):
        raise CheckpointError(f"{path} was trained from other artifacts than {session.run.path} holds")
    session.renumber_stages(manifest)
    stage = session.stages[manifest.stage]
    session.groups.trainer.ensure_on_device(stage)
    session.load(path, None if manifest.last else stage)  # None: the next stage begins with it
    session.checkpoint_log.truncate_to(manifest, list(session.stages))


def load_initial_checkpoint(session: RunningSession) -> None:
    """Load the checkpoint that `init` names, if there is one."""
    if "init" in session.facts:
        session.groups.trainer.ensure_on_device(next(iter(session.stages.values())))
        session.load(Path(session.facts["init"]["commit"]), None)


def find_stage_start(session: RunningSession, name: str) -> Path | None:
    """Find the checkpoint that a stage begins from: the end of the stage before it, or what `init` names.

    Returns:
        The folder of the checkpoint; None if the stage begins from new weights, or if a loop left out the stage before it.
    """
    names = list(session.stages)
    index = names.index(name)
    if index > 0:
        try:
            return session.checkpoint_log.find_stage_end(names[index - 1])
        except CheckpointError:
            return None
    return Path(session.facts["init"]["commit"]) if "init" in session.facts else None


def begin_validation(session: RunningSession, *, resumed: bool) -> StageValidation | None:
    """Create the validations of the current stage, and request the validation of the checkpoint that it begins from.

    Args:
        session: The session.
        resumed: Whether the stage continues from the restored checkpoint. If not, earlier results of it are deleted.

    Returns:
        The validations, or None if the stage is not validated.
    """
    stage, rule = session.stage, make_validation_rule(session.scenario, session.stage.name)
    if rule is None or not session.facts["data"]["held_out"]["valid"]:
        return None
    evaluator = session.evaluator
    if not hasattr(evaluator, "validate"):
        return None
    record = ValidationRecord(session.run, stage.name)
    if resumed:
        _forget_lost_validations(session, record)
    else:
        record.cut(step=0)
    validation = StageValidation(
        stage,
        rule,
        rule.list_validation_steps(stage.steps, stage.epochs),
        record,
        validate=lambda name, folder: _StoredValidation(session, name, folder),
        find_checkpoint=session.checkpoint_log.find_at_step,
        deadline=session.deadlines.evaluate,
        compare=evaluator.compare_validated if hasattr(evaluator, "compare_validated") else None,
    )
    validation.begin(find_stage_start(session, stage.name))
    return validation


class _StoredValidation:
    """The future of a validation, whose result counts once the run has the ranks."""

    def __init__(self, session: RunningSession, stage: str, folder: str):
        self._future = session.evaluator.validate(stage, folder)
        self._session, self._file = session, session.run.results / make_ranks_name(stage, Path(folder).name)

    def done(self) -> bool:
        """Return whether the evaluator has answered."""
        return self._future.done()

    def get(self, timeout_s: Deadline | float | None = None) -> Any:
        """Wait for the result (`GroupFuture.get`). Raises WorkerLost if the ranks were lost with a worker."""
        result = self._future.get(timeout_s)
        self._session.require_stored(self._file)
        return result


def _forget_lost_validations(session: RunningSession, record: ValidationRecord) -> None:
    """Forget results whose ranks the run has lost, and all later ones, if it has their checkpoints to validate them again."""
    log, stage = session.checkpoint_log, session.stage

    def is_lost(checkpoint: Path) -> bool:
        return not log.has_file(session.run.results / make_ranks_name(stage.name, checkpoint.name))

    steps, lost_step = [entry["step"] for entry in record.history], None
    for step in reversed(steps):
        checkpoint = log.find_at_step(stage.first + step)
        if checkpoint is None:
            break
        lost_step = step if is_lost(checkpoint) else lost_step
    start = find_stage_start(session, stage.name)
    record.forget(lost_step, start=start is not None and is_lost(start))


def recompute_rewards(session: RunningSession) -> None:
    """Recompute the recorded rewards of all validated steps of the current stage with its current rewards and weights."""
    validation, objectives = session.validation, session.objectives
    if validation is None or objectives is None or not session.stage.rolls_out:
        return
    stage_options = session.scenario.stages[session.stage.name]
    scenes, step = stage_options.kind.make_scenes(stage_options), session.step or 0

    def judge(parts: Mapping[str, Sequence[float]]) -> tuple[float | None, float]:
        means = {name: float(sum(scene_parts)) for name, scene_parts in parts.items()}
        return objectives.compute_total(parts, step, scenes), objectives.compute_shortfall(means)

    validation.record.recompute_rewards(judge)


def end_stage(session: RunningSession, writer: CheckpointWriter, step: int) -> Path | None:
    """End the current stage after `step` applied steps (`Session.end`, which describes the result)."""
    validation, stage, log = session.validation, session.stage, session.checkpoint_log
    if validation is None or log.has_ended(stage.name):
        return None
    writer.finish(wait=True)
    validation.wait_until(step)
    recompute_rewards(session)
    selection = validation.select()
    best_step = selection.best["step"] if selection.best else step
    guard_failed = selection.guard is not None and not selection.guard["kept"]
    metric = REWARD if validation.rule.reward and not guard_failed else validation.rule.metric
    facts = {"guard": selection.guard, "start": selection.start, "loss": selection.loss}
    facts = {name: value for name, value in facts.items() if value}
    end_step = step if selection.start else best_step
    if selection.start:
        _write_start_as_end(session, writer, stage, step, best_step)
    validation.record.close(metric=metric, best=best_step, ran=step, steps=stage.steps, **facts)
    path, manifest = log.end_stage(stage, end_step)
    if end_step != step:
        session.groups.trainer.ensure_on_device(stage)
        session.load(path, None)
    session.renumber_stages(manifest)
    return path


def end_stage_at_last_checkpoint(session: RunningSession, writer: CheckpointWriter) -> int | None:
    """End the current stage at its newest complete checkpoint (`Session.end_at_last_checkpoint`, which describes the result)."""
    writer.finish(wait=True)
    stage, log = session.stage, session.checkpoint_log
    newest_manifest = log.newest[1] if log.newest else None
    if newest_manifest is None or newest_manifest.stage != stage.name or not newest_manifest.stage_step:
        return None
    applied_steps = newest_manifest.stage_step
    if session.validation is not None and not log.has_ended(stage.name):
        end_stage(session, writer, applied_steps)
    elif not log.has_ended(stage.name):
        _, manifest = log.end_stage(stage, applied_steps)
        session.renumber_stages(manifest)
    assert log.newest is not None
    path, manifest = log.newest
    session.groups.trainer.ensure_on_device(stage)
    # Steps after the checkpoint may have changed the weights in memory.
    session.load(path, None)
    return manifest.stage_step


def _write_start_as_end(
    session: RunningSession, writer: CheckpointWriter, stage: StageSetup, step: int, best_step: int
) -> None:
    """Load the start of a stage and write it as the checkpoint after `step` steps.

    The stage's own best checkpoint, which is not selected, is first copied to RUN/controls.
    """
    start = find_stage_start(session, stage.name)
    unselected = session.checkpoint_log.find_at_step(stage.first + best_step)
    assert start is not None
    control_dir = session.run.path / "controls" / make_unselected_name(stage.name)
    remove(control_dir, "replaced")
    if unselected is not None:
        make_folder(control_dir)
        fetch(unselected)
        shutil.copytree(unselected, control_dir / unselected.name)
    session.groups.trainer.ensure_on_device(stage)
    session.load(start, None)
    writer.write(stage, step, wait=True, as_loaded=True)
