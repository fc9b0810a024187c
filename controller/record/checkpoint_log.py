"""The checkpoints and the journal of a run, and how both are truncated when the run resumes.

A checkpoint holds the files that all groups saved to its staging directory, under one manifest. It may be written while
later steps are applied. The journal records which steps were applied since. When a run resumes, later checkpoints and
journal records than the restored checkpoint are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nonet.background import Written
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.journal import Journal, cut_journal, read_journal
from nonet.controller.record.run_folder import RunFolder, list_subjects_beside, make_rerank_name
from nonet.controller.record.validations import ValidationRecord
from nonet.errors import CheckpointError, ConfigError
from nonet.options import Positive, StrictModel
from nonet.storage import RunWriter, remove
from nonet.workers.roles import StageSetup, make_ranks_name

# The name of the file of a validation's ranks: its stage and its step.
_RANKS_NAME = re.compile(make_ranks_name("(.+)", r"step-(\d+)"))


class CheckpointKeepOptions(StrictModel):
    """Options `checkpoint.keep`: which checkpoints stay on disk."""

    last: Positive = 3
    best: Annotated[
        str | None,
        Field(
            description="the metric whose best validation names the checkpoint that a supervised stage ends with: one of "
            "evaluate.metrics, or nats. By default ndcg@10 where it is measured, else the first of them"
        ),
    ] = None


class Checkpoint(StrictModel):
    """Options `checkpoint`: how often checkpoints are written, and which are kept."""

    every: Positive = 200
    background: Annotated[
        bool, Field(description="checkpoints within a stage are written while its next steps go on")
    ] = True
    keep: CheckpointKeepOptions = CheckpointKeepOptions()


class CheckpointLog:
    """The writer of a run's checkpoints and journal.

    Attributes:
        checkpoints: The checkpoints of the run.
        journal: The journal of the run.
        newest: The directory and the manifest of the newest checkpoint that this process has written or found; None before
            that.

    Args:
        run: The folder of the run.
        scenario_sha256: The sha256 of the scenario's file.
        keep_last: The number of newest checkpoints that are kept.
        writer: The writer of a run in object storage; None for a run in a folder.
    """

    def __init__(self, run: RunFolder, scenario_sha256: str, keep_last: int, writer: RunWriter | None = None):
        self._run, self._scenario_sha256, self._keep_last = run, scenario_sha256, keep_last
        self.checkpoints, self.journal = Checkpoints(run.checkpoints, fetches=False), Journal(run.journal)
        self._writer = writer
        self.newest: tuple[Path, Manifest] | None = None
        self._open_step: tuple[StageSetup, int] | None = None
        # The staging directory and the manifest of the checkpoint that was begun last.
        self._being_written: tuple[Path, Manifest]
        self._stage_ends: dict[str, Path] = {}  # the checkpoints that ended stages in this process
        self._kept_steps: frozenset[int] = (
            frozenset()
        )  # of the last call of `complete_checkpoint` that named some

    def write_record(self, **record: Any) -> None:
        """Write one record to the journal."""
        self.journal.write(**record)

    def record_applied_step(self, stage: StageSetup, step: int, **facts: Any) -> None:
        """Record that a step was applied; `open_step` returns it until the next checkpoint begins.

        Args:
            stage: The stage of the step.
            step: The step within the stage.
            **facts: Further fields of the journal record, which a resumed stage needs.
        """
        self.write_record(applied=stage.first + step, stage=stage.name, **facts)
        self._open_step = stage, step

    def read_groups(self, stage: str) -> list[dict[str, Any]]:
        """Return the journal records of a stage's prompt groups in order.

        Each record says that a group was begun, committed or aborted.
        """
        return [
            record
            for record in read_journal(self._run.journal)
            if "group" in record and record["stage"] == stage
        ]

    @property
    def open_step(self) -> tuple[StageSetup, int] | None:
        """The newest applied step (stage, step within it) that no checkpoint holds, not even one that is being written."""
        return self._open_step

    def begin_checkpoint(
        self,
        stage: StageSetup,
        applied_steps: int,
        version: int,
        artifacts: Mapping[str, str],
        ranks_by_role: Mapping[str, int],
        *,
        last: bool | None = None,
    ) -> Path:
        """Begin a checkpoint after `applied_steps` steps of a stage.

        Args:
            stage: The stage.
            applied_steps: The number of applied steps of the stage.
            version: The number of the newest published version of the weights.
            artifacts: The sha256 of each artifact, by kind.
            ranks_by_role: The number of ranks that write, by role.
            last: Whether the checkpoint ends its stage; by default it does if all steps are applied. `end_stage` marks a
                checkpoint that is selected later.

        Returns:
            The staging directory that every rank writes to before `complete_checkpoint` is called.
        """
        manifest = Manifest(
            run_id=self._run.id,
            step=stage.first + applied_steps,
            stage=stage.name,
            stage_step=applied_steps,
            last=applied_steps == stage.steps if last is None else last,
            version=version,
            scenario=self._scenario_sha256,
            artifacts=dict(artifacts),
            participants=dict(ranks_by_role),
            journal=self.journal.records,
        )
        self._being_written = self.checkpoints.create_staging_dir(manifest.step), manifest
        self._open_step = None
        return self._being_written[0]

    def complete_checkpoint(self, written: Written, kept_steps: frozenset[int] | None = None) -> Path:
        """Complete the checkpoint that `begin_checkpoint` began last, and delete old checkpoints.

        Args:
            written: The files that all ranks wrote, with hashes and sizes.
            kept_steps: The global steps whose checkpoints are kept, such as the best step and those under validation; by
                default those of the call before.

        Returns:
            The directory of the checkpoint.
        """
        self._kept_steps = self._kept_steps if kept_steps is None else kept_steps
        staging_dir, manifest = self._being_written
        with self._writer.hold() if self._writer else nullcontext():
            self.add_written(staging_dir, self.checkpoints.make_path(manifest.step), written)
            path = self.checkpoints.complete(staging_dir, manifest, written)
        self.write_record(committed=manifest.step, stage=manifest.stage)
        self.store_changes()  # before older checkpoints are deleted
        self.checkpoints.prune(self._keep_last, self._kept_steps)
        self.newest = path, manifest
        if manifest.last:
            self._stage_ends[manifest.stage] = path
        return path

    def add_written(self, draft: Path, folder: Path, written: Written) -> None:
        """Add files that workers wrote into a draft folder to a run in object storage; do nothing for a run in a folder.

        Args:
            draft: The folder that the workers wrote to.
            folder: The folder to which it is renamed next; may be the same.
            written: The files, with hashes and sizes.
        """
        if self._writer:
            self._writer.add_written(draft, folder, written)

    def store_changes(self) -> None:
        """Commit the files of a run in object storage, with those that workers wrote; do nothing for a run in a folder.

        During an outage of the storage the files stay local, and are committed later.

        Raises:
            StorageError: The outage is longer than its deadline, or another process has opened the run.
        """
        if self._writer:
            self._writer.commit_or_wait()

    def _list_files(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder of the run, also of those that workers on other nodes have stored."""
        stored = self._writer.list_files(folder) if self._writer else []
        return sorted({*stored, *(path.name for path in folder.glob("*"))})

    def has_file(self, path: Path) -> bool:
        """Return whether the run has a file or folder, in object storage also on other nodes."""
        return self._writer.has_file(path) if self._writer else path.exists()

    def check_writer(self) -> str:
        """Return a warning about the object storage of the run, "" without one.

        Raises:
            StorageConflict: Another process has opened the run.
        """
        if self._writer is None:
            return ""
        self._writer.check()
        return self._writer.pop_warning()

    @contextmanager
    def leave_out(self, folder: str) -> Iterator[None]:
        """Leave a folder of a run in object storage out of commits while a block runs, because its files are incomplete."""
        if self._writer:
            self._writer.excluded = frozenset({folder})
        try:
            yield
        finally:
            if self._writer:
                self._writer.excluded = frozenset()

    def find_at_step(self, step: int) -> Path | None:
        """Return the directory of the checkpoint of a global step; None if it was deleted or is not complete yet."""
        path = self.checkpoints.make_path(step)
        return path if (path / "manifest.json").exists() else None

    def end_stage(self, stage: StageSetup, applied_steps: int) -> tuple[Path, Manifest]:
        """End a stage with the checkpoint after `applied_steps` steps, and delete the later ones.

        Returns:
            The directory and the new manifest of the checkpoint that ends the stage.
        """
        selected_step = stage.first + applied_steps
        # Before the later ones are deleted: which are kept must not depend on how early the last validations ended.
        self.checkpoints.prune(self._keep_last, {selected_step})
        path, manifest = self.checkpoints.mark_stage_end(selected_step)
        self.write_record(ended=manifest.step, stage=stage.name)
        self.checkpoints.delete_after(manifest.step)
        self.newest, self._open_step, self._kept_steps = (path, manifest), None, frozenset()
        self._stage_ends[stage.name] = path
        self.store_changes()
        return path, manifest

    def has_ended(self, stage: str) -> bool:
        """Return whether this process has written or selected the checkpoint that ends the stage."""
        return stage in self._stage_ends

    def find_stage_end(self, stage: str) -> Path:
        """Return the directory of the checkpoint that ends a stage.

        Its files are verified unless this process ended the stage.

        Raises:
            CheckpointError: No complete checkpoint ends this stage.
        """
        return self._stage_ends.get(stage) or self.checkpoints.find_stage_end(stage)

    def find_resume_checkpoint(self) -> tuple[Path, Manifest]:
        """Return the directory and the manifest of the checkpoint to resume from, which is the newest.

        Raises:
            ConfigError: The run has no complete checkpoint.
            CheckpointError: The checkpoint was trained from another scenario.
        """
        newest = self.newest or self.checkpoints.find_newest()
        if newest is None:
            raise ConfigError(
                f"{self._run.path} has no complete checkpoint to resume from; start it again there: nonet run SCENARIO --run-dir "
                f"{self._run.path}"
            )
        path, manifest = newest
        if manifest.scenario != self._scenario_sha256:
            raise CheckpointError(f"{path} was trained from another scenario than {self._run.path} holds")
        self.newest = newest
        return newest

    def truncate_to(self, manifest: Manifest, stages: Sequence[str]) -> None:
        """Delete the checkpoints, results and journal records that come after a restored checkpoint.

        Args:
            manifest: The manifest of the restored checkpoint.
            stages: The names of all stages, in order.
        """
        ranks_by_file = {file: _RANKS_NAME.fullmatch(file) for file in self._list_files(self._run.results)}
        self.checkpoints.delete_after(manifest.step)
        # A stage that the checkpoint ends keeps its results; `last` counts as 1.
        for name in stages[stages.index(manifest.stage) + manifest.last :]:
            subjects = [name, *list_subjects_beside(name)]
            reward_files = [f"{name}.rewards.after.npz", f"{name}.rewards.rerank.npz"]
            if name == manifest.stage:
                # The re-ranked lists were made before the first step and cannot be made again.
                subjects.remove(make_rerank_name(name))
                reward_files.remove(f"{name}.rewards.rerank.npz")
            result_files = [f"{subject}.{suffix}" for subject in subjects for suffix in ("json", "npz")]
            ValidationRecord(self._run, name).cut(manifest.stage_step if name == manifest.stage else 0)
            for file, ranks in ranks_by_file.items():
                if ranks and ranks[1] == name and int(ranks[2]) > manifest.step:
                    result_files.append(file)
            for file in (*reward_files, *result_files):
                remove(self._run.results / file, f"after step {manifest.step}, to which the run was cut")
        self.journal.close()
        cut_journal(self._run.journal, manifest.journal)
        self.journal = Journal(self._run.journal)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()
