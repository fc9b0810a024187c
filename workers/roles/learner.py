"""StageLearner: what a trainer does during one stage. It is created when the stage begins and dropped when the stage ends.

The source of the samples, ledgers, reference policies and mixed-precision state belong to the stage, so they are in the learner.
Weights, optimizer, process groups and checkpoint files belong to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.training import ShardedTables
from nonet.errors import ConfigError
from nonet.models.generation import Voters
from nonet.workers import SaveOptions
from nonet.workers.engines import EngineRuntime, StepMeter, measure_matmul_rate
from nonet.workers.engines.division import is_divided
from nonet.workers.roles.settings import RunSetup, StageSetup, UpdateRequest
from nonet.workers.runtime import Membership

CheckpointPart = Callable[[Path], list[Path]]
"""Writes one part of a checkpoint into the checkpoint's folder and returns the files that it wrote."""


@dataclass(frozen=True, slots=True)
class TensorGroupTables:
    """The sparse tables as the trainers read and update them; of a tensor group, only the leader exchanges rows.

    So the rows of samples that several ranks compute together are sent once, and their gradients count once. All trainers must
    make the same calls, and those of a tensor group with the same keys.

    Attributes:
        sparse: This rank's part of the sparse tables.
        member: This rank's membership in the process group of the trainers.
    """

    sparse: ShardedTables
    member: Membership

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Return the rows [N, D] of keys [N] of a table (`ShardedTables.pull`)."""
        rows = self.sparse.pull(table, keys if self.member.leads_tensor_group else keys[:0], train=train)
        if self.member.tensor == 1:
            return rows
        return self.member.share_in_tensor_group({table: (len(keys), rows.shape[1])}, {table: rows})[table]

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Apply the gradients [N, D] of keys [N] of a table (`ShardedTables.push`)."""
        n_keys = len(keys) if self.member.leads_tensor_group else 0
        self.sparse.push(table, keys[:n_keys], grads[:n_keys], step, lr)

    def stop(self) -> None:
        """End the exchanges of a step (`ShardedTables.stop`)."""
        self.sparse.stop()


@dataclass(frozen=True)
class LearnerContext:
    """The objects of a trainer that its learner uses during a stage.

    Attributes:
        run: Settings of the whole run.
        corpus: Sequences, items and semantic ids (`Corpus`); for a click model, its events and items (`ClickData`).
        dense: The engine that steps the dense weights.
        sparse: This rank's part of the sparse tables.
        member: This rank's membership in the process group of the trainers.
        voters: The voters of the model's memory; None without a memory.
        device: Name of the device, such as `cuda:0`.
        meter: Counts FLOPs and seconds of the training steps.
        rank: Index of the trainer's share of the samples (`Membership.data_rank`).
        world: Number of shares of the samples.
    """

    run: RunSetup
    corpus: Any
    dense: EngineRuntime
    sparse: ShardedTables
    member: Membership
    voters: Voters | None
    device: str
    meter: StepMeter
    rank: int
    world: int

    @property
    def model(self) -> Any:
        """The module that computes losses (the sharded or wrapped model)."""
        return self.dense.model

    @property
    def tables(self) -> TensorGroupTables:
        """The sparse tables, whose rows the leader of a tensor group exchanges for its other ranks."""
        return TensorGroupTables(self.sparse, self.member)

    def count_passes(self, own_passes: int) -> int:
        """Return how many passes of the model this rank takes: as many as the rank with the most if the model is divided."""
        return self.member.find_largest(own_passes) if is_divided(self.model) else own_passes

    def read_items(self) -> None:
        """Replace the item rows of the nearest-item voter by their current values. All ranks must call this together."""
        if self.voters is not None and self.voters.nearest:
            keys = torch.from_numpy(self.corpus.seq.get_item_keys(self.voters.items))
            rows = self.tables.pull(self.run.features["item"], keys, train=False)
            self.voters.read(rows.detach().clone())

    def measure(self, stage: StageSetup) -> dict[str, float]:
        """Return and reset the counts of the meter (`StepMeter.take_counts`), with the device's matrix product rate as "peak"."""
        peak = measure_matmul_rate(self.device, stage.precision.use)
        return {**self.meter.take_counts(), "peak": peak}


class StageLearner:
    """Trains one stage on one rank.

    A stage kind names its learner (`StageKind.learner`); a kind that names none uses the model's (`ModelSpec.learner`). The
    learner of a stage with its own loss is a subclass of `SupervisedLearner` or of this class.
    """

    def __init__(self, context: LearnerContext, stage: StageSetup):
        self.context, self.stage = context, stage

    def begin(self) -> None:
        """Create the state that the stage needs besides the weights, before its first step."""

    def restore(self, folder: Path) -> None:
        """Restore the stage's state from a checkpoint to continue the stage."""

    def train(self, start: int, stop: int) -> list[dict[str, float]]:
        """Take the supervised steps [start, stop) and return one record per step.

        Raises:
            ConfigError: The stage does not learn from batches.
        """
        raise ConfigError(
            f"stage {self.stage.name!r} learns from rollouts: call update(request, beams, scores), not train"
        )

    def update(
        self, request: UpdateRequest, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Take one RL step (`Trainer.update`) and return its record.

        Args:
            request: Stage, step and weights of the rewards.
            beams: Rollouts of this rank's prompts, as encoded by `to_wire`.
            scores: Scores [U, W] by reward.

        Raises:
            ConfigError: The stage does not learn from rollouts.
        """
        raise ConfigError(
            f"stage {self.stage.name!r} learns from batches: call train(start, stop), not update"
        )

    def list_checkpoint_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return functions that write the stage's current state into a checkpoint folder.

        Of a tensor group, only the leader is asked.
        """
        return []

    def list_divided_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return functions that write tensors that all trainers divide. All ranks must call it."""
        return []

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that the stage keeps on the device besides the weights and their optimizer."""
        return []
