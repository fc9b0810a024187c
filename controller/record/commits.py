"""CommitLog: the commits and the journal of a run, and what is forgotten when it goes on from a commit.

A commit is what the groups save aside, under one manifest, maybe while later steps are applied; the journal says which steps
were applied between commits. After a resume both end where the restored commit ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.background import Written
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.journal import Journal, cut_journal, read_journal
from nonet.controller.record.run_folder import RunFolder, rerank_name, subjects_beside
from nonet.controller.record.validations import Validations
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.roles import StageSetup


class CommitLog:
    """keep_last: how many commits are kept beside those that end a stage; scenario: its hash."""

    def __init__(self, run: RunFolder, scenario: str, keep_last: int):
        self._run, self._scenario, self._keep_last = run, scenario, keep_last
        self.checkpoints, self.journal = Checkpoints(run.checkpoints), Journal(run.journal)
        self.newest: tuple[Path, Manifest] | None = None
        self._open_step: tuple[StageSetup, int] | None = None
        self._begun: tuple[Path, Manifest]
        self._ends: dict[str, Path] = {}
        self.spared: frozenset[int] = (
            frozenset()
        )  # global steps whose commits stay: the best, and what is validated

    def note(self, **record: Any) -> None:
        """One record of the journal."""
        self.journal.write(**record)

    def applied(self, stage: StageSetup, step: int, **facts: Any) -> None:
        """A step has been applied; until the next commit it is open. `facts`: what a resumed stage must know of it."""
        self.note(applied=stage.first + step, stage=stage.name, **facts)
        self._open_step = stage, step

    def groups_of(self, stage: str) -> list[dict[str, Any]]:
        """What the journal says of a stage's groups of prompts: when each was begun, and committed or aborted."""
        return [
            record
            for record in read_journal(self._run.journal)
            if "group" in record and record["stage"] == stage
        ]

    @property
    def open_step(self) -> tuple[StageSetup, int] | None:
        """The newest applied step that no commit holds, not even one that is being written."""
        return self._open_step

    def begin(
        self,
        stage: StageSetup,
        done: int,
        version: int,
        artifacts: Mapping[str, str],
        worlds: Mapping[str, int],
        *,
        last: bool | None = None,
    ) -> Path:
        """Open a commit after `done` steps of a stage; the folder that every participant writes in until `finish`.

        `last`: whether it ends its stage, by default where all steps are done. One that is chosen later is told by `end`.
        """
        manifest = Manifest(
            run_id=self._run.id,
            step=stage.first + done,
            stage=stage.name,
            stage_step=done,
            last=done == stage.steps if last is None else last,
            version=version,
            scenario=self._scenario,
            artifacts=dict(artifacts),
            participants=dict(worlds),
            journal=self.journal.records,
        )
        self._begun = self.checkpoints.aside(manifest.step), manifest
        self._open_step = None
        return self._begun[0]

    def finish(self, written: Written) -> Path:
        """Make the open commit count, of the files that its participants say they wrote; its folder."""
        aside, manifest = self._begun
        path = self.checkpoints.commit(aside, manifest, written)
        self.note(committed=manifest.step, stage=manifest.stage)
        self.checkpoints.prune(self._keep_last, self.spared)
        self.newest = path, manifest
        if manifest.last:
            self._ends[manifest.stage] = path
        return path

    def at(self, step: int) -> Path | None:
        """The commit of a global step, None where it is gone or not whole yet."""
        path = self.checkpoints.root / f"step-{step:06d}"
        return path if (path / "manifest.json").exists() else None

    def end(self, stage: StageSetup, done: int) -> tuple[Path, Manifest]:
        """Let the commit after `done` steps end its stage: later ones are dropped, and what follows goes on from it."""
        path, manifest = self.checkpoints.mark_last(stage.first + done)
        self.note(ended=manifest.step, stage=stage.name)
        self.checkpoints.drop_after(manifest.step)
        self.checkpoints.prune(self._keep_last)
        self.newest, self._open_step, self.spared = (path, manifest), None, frozenset()
        self._ends[stage.name] = path
        return path, manifest

    def ended(self, stage: str) -> bool:
        """Whether a stage was ended by this process."""
        return stage in self._ends

    def end_of(self, stage: str) -> Path:
        """The commit that ends a stage; one that was made here is not read again. Raises CheckpointError."""
        return self._ends.get(stage) or self.checkpoints.end_of(stage)

    def find(self) -> tuple[Path, Manifest]:
        """The commit to go on from. Raises ConfigError where there is none, CheckpointError where it is of another scenario."""
        newest = self.newest or self.checkpoints.newest()
        if newest is None:
            raise ConfigError(f"{self._run.path} has no whole commit to resume from; run it afresh")
        path, manifest = newest
        if manifest.scenario != self._scenario:
            raise CheckpointError(f"{path} was trained from another scenario than {self._run.path} holds")
        self.newest = newest
        return newest

    def forget_after(self, manifest: Manifest, stages: Sequence[str]) -> None:
        """Drop commits, results and journal records that the restored commit does not know of."""
        self.checkpoints.drop_after(manifest.step)
        for name in stages[stages.index(manifest.stage) + manifest.last :]:
            subjects = [name, *subjects_beside(name)]
            rewards = [f"{name}.rewards.after.npz", f"{name}.rewards.rerank.npz"]
            if name == manifest.stage:  # of what came before its first step, and cannot be made again
                subjects.remove(rerank_name(name))
                rewards.pop()
            for file in (*rewards, *(f"{subject}.{end}" for subject in subjects for end in ("json", "npz"))):
                (self._run.results / file).unlink(missing_ok=True)
        for name in stages[stages.index(manifest.stage) :]:
            if (name, manifest.last) != (manifest.stage, True):
                Validations(self._run, name).cut(manifest.stage_step if name == manifest.stage else 0)
        self.journal.close()
        cut_journal(self._run.journal, manifest.journal)
        self.journal = Journal(self._run.journal)

    def close(self) -> None:
        self.journal.close()
