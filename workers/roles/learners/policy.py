"""PolicyLearner: trains the policy of an RL stage on one rank, from beams and their scores.

Sparse rows are frozen during RL unless the stage has a `sparse_lr`. In that case the reference keeps the original
values of the rows that change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nonet.errors import CheckpointError, DataError
from nonet.rl import Critic
from nonet.rl.algorithms import ALGORITHMS
from nonet.samples.ledger import has_ledger, write_notes, write_snapshot
from nonet.samples.sources import RlPrompts
from nonet.stored_tensors import StoredTensors
from nonet.workers import FrozenPolicy, SaveOptions, copy_to_host, load_model, write_tensors
from nonet.workers.devices import claim
from nonet.workers.engines.division import copy_frozen, list_weights, save_model
from nonet.workers.roles import CheckpointPart, LearnerContext, StageLearner, StageSetup, UpdateRequest
from nonet.workers.roles.learners.policy_update import PolicyUpdate

_MAX_STOPPED_STEPS = 3  # The run stops after this many successive steps with too large a mismatch.
# File in a checkpoint with the original values of the sparse rows that the stage has changed.
_REFERENCE_ROWS = "rows.safetensors"


class PolicyLearner(StageLearner):
    """Trains a stage from beams and their scores."""

    def __init__(self, context: LearnerContext, stage: StageSetup):
        super().__init__(context, stage)
        self.algorithm = ALGORITHMS.get(stage.algorithm["use"])
        self.prompts = RlPrompts(context.corpus.seq, context.run.seed, stage.name, stage.users)
        self.reference: FrozenPolicy | None = None
        self.critic: Critic | None = None
        self._versions: dict[int, FrozenPolicy] = {}
        self._skipped = 0  # Successive steps that were skipped because a loss or gradient was not finite.
        # Successive steps that were not used because rollouts differed too much from the trainer.
        self._stopped_steps = 0
        self._items_are_read = False  # Whether the nearest-item voter has read the current rows.

    def begin(self) -> None:
        """Create the reference, a copy of the policy, and the value head, if the algorithm needs them."""
        if self.algorithm.needs_reference(self.stage.algorithm):
            self.reference = self._freeze_policy()
        self.critic = self._make_critic()

    def restore(self, folder: Path) -> None:
        """Restore the prompt ledger, the reference and the value head from a checkpoint."""
        if has_ledger(folder):
            self.prompts.ledger.load(folder, self.context.rank)
        if self.algorithm.needs_reference(self.stage.algorithm):
            self.reference = self._freeze_policy()
            load_model(self.reference.model, folder / "reference")
            self._load_reference_rows(self.reference, folder)
        self.critic = self._make_critic()
        if self.critic is not None:
            self.critic.load(StoredTensors(folder / "critic" / "model.safetensors"))

    def update(
        self, request: UpdateRequest, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Take one RL step (`StageLearner.update`)."""
        context, stage, step = self.context, self.stage, request.step
        if not self._items_are_read:
            context.read_items()
            self._items_are_read = True
        update = PolicyUpdate(
            context,
            stage if request.weights is None else replace(stage, weights=request.weights),
            self.algorithm,
            self.reference,
            self.critic,
            self._store_version(request.version),
        )
        context.meter.take_counts()  # Drop counts of earlier work.
        record = update.step(step, beams, scores)
        self._check_mismatch(record)
        self._skipped = self._skipped + 1 if record.get("skipped") and record["norm"] == 0.0 else 0
        record |= {"skipped_in_a_row": float(self._skipped)} if self._skipped else {}
        record |= context.measure(stage)
        self._renew_reference(step)
        self._items_are_read = stage.sparse_lr is None  # Trained rows must be read again in the next step.
        self.prompts.record_step(step, beams["user"], beams["position"])
        return record

    def list_checkpoint_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return functions that write the reference's rows, the value head and the prompt ledger."""
        parts: list[CheckpointPart] = []
        rank = self.context.rank
        if self.reference is not None and rank == 0 and (rows := self.reference.to_row_tensors()):
            parts.append(partial(_write_tensors, "reference", copy_to_host(rows), name=_REFERENCE_ROWS))
        if self.critic is not None and rank == 0:
            parts.append(partial(_write_tensors, "critic", copy_to_host(self.critic.get_tensors())))
        ledger = self.prompts.ledger
        parts.append(
            partial(write_notes, ledger.dump_notes(), rank)
            if rank
            else partial(write_snapshot, ledger.snapshot())
        )
        return parts

    def list_divided_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return the function that writes this rank's part of the reference."""
        if self.reference is None:
            return []
        member = self.context.member
        saved = save_model(self.reference.model, member.n_trainers, saving)
        write_reference = saved.make_writer(member.rank, copy=saving.copy)
        return [lambda folder: write_reference(folder / "reference")]

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the reference."""
        return list_weights(self.reference.model) if self.reference is not None else []

    def _store_version(self, version: int | None) -> dict[int, FrozenPolicy]:
        """Store a copy of the policy under its version, and return the stored versions that beams may still come from."""
        staleness = int(self.stage.mismatch.get("staleness", 0))
        if version is None or not staleness:
            return {}
        self._versions[version] = self._freeze_policy()
        self._versions = {
            number: policy for number, policy in self._versions.items() if number >= version - staleness
        }
        return self._versions

    def _check_mismatch(self, record: Mapping[str, float]) -> None:
        """Count the successive steps whose rollouts differed too much from the trainer, and stop after too many.

        Raises:
            DataError: There were `_MAX_STOPPED_STEPS` such steps.
        """
        self._stopped_steps = self._stopped_steps + 1 if record.get("mismatch/stopped") else 0
        if self._stopped_steps >= _MAX_STOPPED_STEPS:
            raise DataError(
                f"rollout and trainer differed by {record['mismatch/kl']:.3g} nats per level in {_MAX_STOPPED_STEPS} successive "
                "steps, more than mismatch.stop_at_kl, so these steps were not used; check that both read the same weights and "
                "rows"
            )

    def _freeze_policy(self) -> FrozenPolicy:
        """Return a copy of the current policy without gradients."""
        return FrozenPolicy(copy_frozen(self.context.model))

    def _renew_reference(self, step: int) -> None:
        """Replace the reference by the current policy every `reference.every` steps, if the algorithm has this option."""
        options = self.stage.algorithm.get("reference")
        if self.reference is None or not isinstance(options, Mapping):
            return
        if options.get("every") and (step + 1) % options["every"] == 0:
            self.reference = self._freeze_policy()

    def _load_reference_rows(self, reference: FrozenPolicy, folder: Path) -> None:
        """Load the reference's rows from a checkpoint.

        Raises:
            CheckpointError: The stage has changed rows, and the checkpoint was written by a version that did not store the
                original rows.
        """
        path = folder / "reference" / _REFERENCE_ROWS
        if path.exists():
            reference.load_rows(StoredTensors(path), self.context.device)
        elif self.stage.sparse_lr is not None:
            raise CheckpointError(
                f"{folder} has no {path.relative_to(folder)}: it was written inside a stage with sparse_lr by a version that did "
                "not store the reference's sparse rows, so its KL term cannot be computed; start the run again"
            )

    def _make_critic(self) -> Critic | None:
        """Create the value head; None if the algorithm has none."""
        context, lr = self.context, self.algorithm.value_rate(self.stage.algorithm)
        return Critic(context.model.width, context.corpus.codes, lr, claim(context.device)) if lr else None


def _write_tensors(
    kind: str, tensors: Mapping[str, Tensor], folder: Path, name: str = "model.safetensors"
) -> list[Path]:
    """Write tensors to folder/kind/name, and return the path in a list."""
    path = folder / kind / name
    write_tensors(path, tensors)
    return [path]
