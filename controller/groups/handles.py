"""Handles of a run's trainers, shards and rollouts, as the loops of stages use them.

They pass futures on without fetching their values; only counts, versions and metrics come back to the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nonet.deadlines import DEFAULTS, Deadline, Deadlines
from nonet.embedding.training import merge_counts, sum_shard_counts
from nonet.errors import ConfigError
from nonet.workers.roles import RolloutRequest, StageSetup, UpdateRequest
from nonet.workers.runtime import GroupFuture, PerRank, Rendezvous, Replicate, Shard, WorkerGroup, get_all


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The prompts of one RL step.

    By default, rollouts derive the prompts from the step; `users` and `positions` name prompts explicitly.

    Attributes:
        stage: The RL stage.
        step: The step of the stage.
        size: The maximum number of prompts.
        users: The row number of each prompt's user [U], for explicit prompts.
        positions: The position of each prompt in the sequence of its user [U], for explicit prompts.
        served: Whether to return the most likely items, which would be recommended, even if the stage samples.
        width: The number of items for each prompt; by default that of the stage.
        blind: Whether to omit the users' next items from the beams, since they are unknown in serving.
    """

    stage: str
    step: int
    size: int = 0
    users: np.ndarray | None = None
    positions: np.ndarray | None = None
    served: bool = False
    width: int | None = None
    blind: bool = False


Enter = Callable[[str, str], None]  # called with a stage and its phase before a group works in the phase


def ignore_phase(stage: str, phase: str) -> None:
    """Do nothing, because groups that fit on the device together stay there."""


class RewardWeights(Protocol):
    """The weights of rewards by step, which may depend on the records of earlier steps."""

    def compute_weights(self, step: int) -> dict[str, float]:
        """Return the weight of each reward at a step."""
        ...

    def update_multipliers(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Update the weights with the record of a step, and return them as metrics."""
        ...


class TrainerHandle:
    """The trainer group, and the embedding shards that work with it.

    Attributes:
        apart: Whether the shards are in other processes than the trainers.
        buckets: The number of buckets in which weights are published.
        delta: Whether rollouts receive only the weights that changed.
    """

    def __init__(
        self,
        group: WorkerGroup,
        shards: WorkerGroup,
        enter: Enter = ignore_phase,
        deadlines: Deadlines = DEFAULTS,
        *,
        buckets: int = 0,
        delta: bool = False,
    ):
        self.group, self.shards, self._enter, self.deadlines = group, shards, enter, deadlines
        self.apart = shards.hosts is not group.hosts
        self.buckets, self.delta = buckets, delta
        # Both come back with every step, and are None if they must be fetched.
        self._counts: dict[str, dict[str, int]] | None = None
        self._replica_bytes: int | None = None

    def ensure_on_device(self, stage: StageSetup) -> None:
        """Move the trainer to its device, so that it can be saved, loaded or published."""
        self._enter(stage.name, stage.phases[1])

    def begin(self, stage: StageSetup) -> None:
        """Begin a stage from its start."""
        self._replica_bytes = None
        self._enter(stage.name, stage.phases[0])
        self.group.begin(stage).get(self.deadlines.step)

    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Run the supervised steps [start, stop) and return a record for each step."""
        self._enter(stage.name, "train")
        return self._run_with_shards(
            self.group.train(stage, start, stop), self.deadlines.step.scale_by(stop - start)
        )

    def update(
        self,
        stage: StageSetup,
        step: int,
        beams: GroupFuture,
        scores: Mapping[str, GroupFuture],
        *,
        version: int,
        objectives: RewardWeights | None = None,
    ) -> dict[str, float]:
        """Take one RL step on beams and scores, which stay where they are.

        Args:
            stage: The RL stage.
            step: Number of the step in the stage.
            beams: Rollouts on the wire.
            scores: Scores [U, W] by reward.
            version: The version under which the current weights were published; 0 before the first publication.
            objectives: The weights of the rewards, which the record of the step updates; None for the weights of the stage.

        Returns:
            The record of the step (`Trainer.update`).
        """
        self._enter(stage.name, "update")
        request = UpdateRequest(
            stage,
            step,
            weights=objectives.compute_weights(step) if objectives else None,
            version=(version or None) if stage.mismatch else None,
        )
        record = self._run_with_shards(self.group.update(request, beams, scores), self.deadlines.step)
        return record | (objectives.update_multipliers(step, record) if objectives else {})

    def pop_table_counts(self) -> dict[str, dict[str, int]]:
        """Return the counters of the sparse tables since the last call, over all shards, and reset them.

        No remote call is made right after a step, because every step returns them.

        Returns:
            Counts by table and name.
        """
        if self._counts is None:
            self._add_counts(self.shards.pop_counts().get(self.deadlines.step))
        counts, self._counts = self._counts, None
        return counts or {}

    def count_replica_bytes(self) -> int:
        """Return the bytes of keys and rows that a replica of all tables holds.

        No remote call is made right after a step, because every step returns them.
        """
        if self._replica_bytes is None:
            self._replica_bytes = sum(self.shards.count_replica_bytes().get(self.deadlines.step))
        return self._replica_bytes

    def fit_memory(self) -> None:
        """Fit the memory's weights to validation events."""
        self._run_with_shards(self.group.fit_memory(), self.deadlines.step)

    def reshard(self, shards: Sequence[int]) -> int:
        """Move rows until these shards hold all of them, and return the new version of the slice map."""
        return self._run_with_shards(self.group.reshard(shards), self.deadlines.reshard)

    def count_published(self) -> dict[str, dict[str, int]]:
        """Return the row updates sent to replicas since the start: {"full" | "delta": {"updates", "bytes"}}."""
        return sum_shard_counts(self.shards.get_update_counts().get(self.deadlines.step))

    def _run_with_shards(self, trainer_call: GroupFuture, timeout_s: Deadline) -> Any:
        """Return the answer of the trainers. Shards in other processes serve them meanwhile; their counters are stored here."""
        serve_calls = [self.shards.serve()] if self.apart else []
        count_calls = self.shards.pop_counts(), self.shards.count_replica_bytes()
        answer, *_, counts, replica_sizes = get_all(timeout_s, trainer_call, *serve_calls, *count_calls)
        self._add_counts(counts)
        self._replica_bytes = sum(replica_sizes)
        return answer

    def _add_counts(self, counts: list[dict[str, dict[str, int]]]) -> None:
        """Add the counters of the shards to those that have not been returned yet."""
        self._counts = merge_counts(self._counts or {}, sum_shard_counts(counts))


def join_training_groups(
    trainers: WorkerGroup, shards: WorkerGroup, deadlines: Deadlines, epoch: int = 0
) -> None:
    """Join trainers and shards in a process group, if there is more than one process; `epoch` numbers the groups of a run."""
    shard_count = shards.world if shards.hosts is not trainers.hosts else 0
    if trainers.world + shard_count == 1:
        return
    store = trainers.open_rendezvous().get(deadlines.step)
    rendezvous = Rendezvous(store, epoch, trainers.world, shard_count, deadlines.step)
    joins = [trainers.join_process_group(PerRank([rendezvous] * trainers.world))]
    if shard_count:
        joins.append(shards.join_process_group(PerRank([rendezvous] * shard_count)))
    for join in joins:
        join.get(deadlines.step)


class EmbeddingHandle:
    """The sparse tables of a run over all shards, for use between steps only: the trainers take part in moving rows."""

    def __init__(self, trainer: TrainerHandle):
        self._trainer = trainer

    def count_rows(self) -> list[dict[str, int]]:
        """Return the number of rows of each table, by shard."""
        return self._trainer.shards.count_rows().get(self._trainer.deadlines.step)

    def reshard(self, shards: int | Sequence[int]) -> list[dict[str, int]]:
        """Distribute all rows and their optimizer state evenly over the given shards, while readers use the published version.

        Args:
            shards: The numbers of the shards, or how many of the first shards.

        Returns:
            The number of rows of each table, by shard.

        Raises:
            ConfigError: The run does not have these shards.
        """
        world = self._trainer.shards.world
        targets = list(range(shards)) if isinstance(shards, int) else list(shards)
        if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(range(world)):
            raise ConfigError(
                f"reshard wants distinct shards out of the run's {world} (0 to {world - 1}), got {targets}; "
                "start with more: roles.embedding.workers"
            )
        if world > 1:
            self._trainer.reshard(targets)
        return self.count_rows()


class RolloutHandle:
    """The rollout group.

    Args:
        group: The rollout group.
        options: The options of the rollout, by stage.
        enter: Called before the group works in a phase.
        deadlines: The deadlines of the run.
        chunks: By stage, how many prompts a worker generates beams for at once; None for all.
        between: By stage, the groups that change beams before they are scored, in this order.

    Attributes:
        absent: The number of positions that read the default row between the last two versions.
    """

    def __init__(
        self,
        group: WorkerGroup,
        options: Mapping[str, Mapping[str, Any]],
        enter: Enter = ignore_phase,
        deadlines: Deadlines = DEFAULTS,
        chunks: Mapping[str, int | None] | None = None,
        between: Mapping[str, Sequence[WorkerGroup]] | None = None,
    ):
        self.group, self._options, self._enter = group, options, enter
        self.deadlines, self._chunks = deadlines, dict(chunks or {})
        self._between = dict(between or {})
        self._pending_applies: list[GroupFuture] = []
        self.absent = 0

    def ensure_on_device(self, stage: str) -> None:
        """Move the rollout to its device for a stage."""
        self._enter(stage, "rollout")

    def apply(
        self,
        version: int,
        options: Mapping[str, Any],
        other_calls: Sequence[GroupFuture],
        *,
        in_background: bool,
    ) -> None:
        """Let all ranks switch to a version before their next prompts.

        Args:
            version: The version.
            options: Further arguments of the ranks' `apply`: what they switch to besides.
            other_calls: The calls that send the version.
            in_background: Whether to return before the ranks have switched, and before `other_calls` are answered.
        """
        call = self.group.apply(version, **options)
        if in_background:
            ended = [pending for pending in self._pending_applies if pending.done()]
            self.absent = sum(pending.get(self.deadlines.step) for pending in ended)
            remaining = [pending for pending in self._pending_applies if pending not in ended]
            self._pending_applies = [*remaining, call]
        else:
            *_, self.absent = get_all(self.deadlines.step, *other_calls, call)

    def generate(self, prompts: PromptRequest, version: int) -> GroupFuture:
        """Start generating beams of the published version for prompts, and return the future."""
        self.ensure_on_device(prompts.stage)
        request = self._build_request(prompts, version)
        if prompts.users is None:
            beams = self.group.generate_step(prompts.size, request)
        else:
            beams = self.group.generate(Shard(prompts.users), Shard(prompts.positions), request)
        return self._apply_between(prompts, beams)

    def generate_group(
        self, rank: int, prompts: PromptRequest, version: int, part: tuple[int, int]
    ) -> GroupFuture:
        """Start generating beams on one rank for a part of a step's prompts; `part` is (index, number of parts)."""
        beams = self.group.call_rank(
            rank, "generate_group", prompts.size, Replicate(part), self._build_request(prompts, version)
        )
        return self._apply_between(prompts, beams)

    def _apply_between(self, prompts: PromptRequest, beams: GroupFuture) -> GroupFuture:
        """Return beams after the stage's steps between rollout and rewards."""
        for group in self._between.get(prompts.stage, ()):
            beams = group.apply(beams)
        return beams

    def _build_request(self, prompts: PromptRequest, version: int) -> RolloutRequest:
        """Build the request that tells rollouts how to generate beams for these prompts."""
        options = self._options[prompts.stage]
        has_draw_options = len(options) > 1  # options besides the width
        return RolloutRequest(
            stage=prompts.stage,
            step=prompts.step,
            width=prompts.width or options["width"],
            version=version,
            chunk=self._chunks.get(prompts.stage),
            draw=dict(options) if has_draw_options and not prompts.served else {},
            blind=prompts.blind,
        )
