"""The checkpoints that runs and stages begin with and end with.

A resumed run begins with its newest checkpoint. A stage begins with the checkpoint that ended the stage before it, and
ends with the checkpoint that its validations select.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from nonet.atomic import make_folder
from nonet.controller.record import Manifest, ValidationRecord, make_unselected_name
from nonet.controller.scenario import REWARD, make_validation_rule
from nonet.controller.session.artifacts import list_artifact_hashes
from nonet.controller.session.checkpoint_writer import CheckpointWriter
from nonet.controller.session.interface import RunningSession
from nonet.controller.session.stage_validation import StageValidation
from nonet.controller.setup import renumber_stages
from nonet.errors import CheckpointError
from nonet.workers.roles import StageSetup


def restore_newest_checkpoint(session: RunningSession) -> Manifest:
    """Load the newest complete checkpoint, and delete what came after it.

    Raises:
        CheckpointError: The checkpoint was trained from other artifacts.
    """
    path, manifest = session.checkpoint_log.find_resume_checkpoint()
    if manifest.artifacts != list_artifact_hashes(session.facts):
        raise CheckpointError(f"{path} was trained from other artifacts than {session.run.path} holds")
    session.stages = renumber_stages(session.stages, manifest)
    stage = session.stages[manifest.stage]
    session.trainer.ensure_on_device(stage)
    session.groups.load(path, None if manifest.last else stage)
    session.checkpoint_log.truncate_to(manifest, list(session.stages))
    session.version = manifest.version
    return manifest


def load_initial_checkpoint(session: RunningSession) -> None:
    """Load the checkpoint that `init` names, if there is one."""
    if "init" in session.facts:
        session.trainer.ensure_on_device(next(iter(session.stages.values())))
        session.groups.load(Path(session.facts["init"]["commit"]), None)


def find_stage_start(session: RunningSession, name: str) -> Path | None:
    """Return the checkpoint that a stage begins from: the end of the stage before it, or what `init` names.

    Returns:
        The folder, or None if there is none, as in a loop that leaves earlier stages out.
    """
    names = list(session.stages)
    if index := names.index(name):
        try:
            return session.checkpoint_log.find_stage_end(names[index - 1])
        except CheckpointError:
            return None
    return Path(session.facts["init"]["commit"]) if "init" in session.facts else None


def begin_validation(session: RunningSession, *, resumed: bool) -> StageValidation | None:
    """Create the validations of the current stage, and request that of the checkpoint that it begins from.

    Args:
        session: The session.
        resumed: Whether the stage continues from the restored checkpoint; otherwise earlier results are deleted.

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
    if not resumed:
        record.cut(0)
    validation = StageValidation(
        stage,
        rule,
        rule.list_validation_steps(stage.steps, stage.epochs),
        record,
        lambda name, folder: session.evaluator.validate(name, folder),
        session.checkpoint_log.find_at_step,
        session.deadlines.evaluate,
        evaluator.compare_validated if hasattr(evaluator, "compare_validated") else None,
    )
    validation.begin(find_stage_start(session, stage.name))
    return validation


def recompute_rewards(session: RunningSession) -> None:
    """Recompute the rewards of all candidates of the current stage with the current rewards and weights."""
    validation, objectives = session.validation, session.objectives
    if validation is None or objectives is None or not session.stage.rolls_out:
        return
    stage_options = session.scenario.stages[session.stage.name]
    scenes, step = stage_options.kind.make_scenes(stage_options), session.step

    def judge(parts: Mapping[str, Sequence[float]]) -> tuple[float | None, float]:
        means = {name: float(sum(values)) for name, values in parts.items()}
        return objectives.compute_total(parts, step, scenes), objectives.compute_shortfall(means)

    validation.record.recompute_rewards(judge)


def end_stage(session: RunningSession, writer: CheckpointWriter, step: int) -> Path | None:
    """End the current stage after `step` applied steps (`Session.end`)."""
    validation, stage, log = session.validation, session.stage, session.checkpoint_log
    if validation is None or log.has_ended(stage.name):
        return None
    writer.finish(wait=True)
    validation.wait_until(step)
    recompute_rewards(session)
    selected = validation.select()
    best = selected.best["step"] if selected.best else step
    fell_back = selected.guard is not None and not selected.guard["kept"]
    metric = REWARD if validation.rule.reward and not fell_back else validation.rule.metric
    facts = {"guard": selected.guard, "start": selected.start, "loss": selected.loss}
    facts = {name: value for name, value in facts.items() if value}
    ends = step if selected.start else best
    if selected.start:
        _select_start(session, writer, stage, step, best)
    validation.record.close(metric=metric, best=best, ran=step, steps=stage.steps, **facts)
    path, manifest = log.end_stage(stage, ends)
    if ends != step:
        session.trainer.ensure_on_device(stage)
        session.groups.load(path, None)
    session.stages = renumber_stages(session.stages, manifest)
    return path


def end_stage_at_last_checkpoint(session: RunningSession, writer: CheckpointWriter) -> int | None:
    """End the current stage at its newest complete checkpoint (`Session.end_at_last_checkpoint`)."""
    writer.finish(wait=True)
    stage, log = session.stage, session.checkpoint_log
    newest = log.newest
    if newest is None or newest[1].stage != stage.name or not newest[1].stage_step:
        return None
    applied_steps = newest[1].stage_step
    if session.validation is not None and not log.has_ended(stage.name):
        end_stage(session, writer, applied_steps)
    elif not log.has_ended(stage.name):
        _, manifest = log.end_stage(stage, applied_steps)
        session.stages = renumber_stages(session.stages, manifest)
    assert log.newest is not None
    path, manifest = log.newest
    session.trainer.ensure_on_device(stage)
    session.groups.load(path, None)  # later steps may have changed the weights before the first skipped step
    return manifest.stage_step


def _select_start(
    session: RunningSession, writer: CheckpointWriter, stage: StageSetup, step: int, best: int
) -> None:
    """Select the start of a stage: write it as the checkpoint after `step` steps, and copy the best of the stage's own."""
    start = find_stage_start(session, stage.name)
    unselected = session.checkpoint_log.find_at_step(stage.first + best)
    assert start is not None
    copies = session.run.path / "controls" / make_unselected_name(stage.name)
    shutil.rmtree(copies, ignore_errors=True)
    if unselected is not None:
        make_folder(copies)
        shutil.copytree(unselected, copies / unselected.name)
    session.trainer.ensure_on_device(stage)
    session.groups.load(start, None)
    writer.write(stage, step, wait=True, as_loaded=True)
