"""The groups of a run as its loop sees them: trainer, rollout, rewards, evaluator.

They pass futures on and hold none of their values; what comes back to the controller is counts, versions and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nonet.deadlines import DEFAULTS, Deadline, Deadlines
from nonet.embedding.training import merge_counts, sum_shard_counts
from nonet.errors import ConfigError
from nonet.workers.roles import RolloutRequest, StageSetup
from nonet.workers.runtime import GroupFuture, PerRank, Rendezvous, Replicate, Shard, WorkerGroup, get_all


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one RL step: by default those that every rollout knows, a function of the step, `size` of them at most.

    Of one's own: rows of users [U] and positions [U]; metadata, no histories. `served`: what would be recommended is asked
    for, the most likely items, however the stage draws. `width`: items a prompt, by default those of the stage; `blind`: beams do
    not say what the user took next, as nobody knows where lists are served.
    """

    stage: str
    step: int
    size: int = 0
    users: np.ndarray | None = None
    positions: np.ndarray | None = None
    served: bool = False
    width: int | None = None
    blind: bool = False


Enter = Callable[[str, str], None]  # a phase of a stage, before a group works in it


def _nothing(stage: str, phase: str) -> None:
    """Groups that fit together take no turns."""


class Weights(Protocol):
    """What each reward counts at a step, and what a step's record changes of it."""

    def weights(self, step: int) -> dict[str, float]: ...
    def learn(self, step: int, record: Mapping[str, float]) -> dict[str, float]: ...


class TrainerHandle:
    """The trainer group, and the embedding shards that work with it."""

    def __init__(
        self,
        group: WorkerGroup,
        shards: WorkerGroup,
        enter: Enter = _nothing,
        deadlines: Deadlines = DEFAULTS,
    ):
        self.group, self.shards, self._enter, self.deadlines = group, shards, enter, deadlines
        self.apart = shards.hosts is not group.hosts
        self.at: tuple[StageSetup, int] | None = None
        self.objectives: Weights | None = None
        self.version: int | None = None  # what its weights were published as, last
        self._counts: dict[str, dict[str, int]] | None = (
            None  # since they were asked for; come along with every step
        )
        self._replica_bytes: int | None = None  # as of the last step
        self.delta = False  # whether rollouts are sent what changed of the weights alone
        self.buckets = 0  # that its weights are published in, known once it is open

    def gather(self, epoch: int = 0) -> None:
        """Let trainers and shards meet in a process group, where there is more than one process."""
        shards = self.shards.world if self.apart else 0
        if self.group.world + shards == 1:
            return
        host, port = self.group.host_gang().get(self.deadlines.step)
        rendezvous = Rendezvous(host, port, epoch, self.group.world, shards, self.deadlines.step)
        waits = [self.group.join_process_group(PerRank([rendezvous] * self.group.world))]
        if self.apart:
            waits.append(self.shards.join_process_group(PerRank([rendezvous] * shards)))
        for wait in waits:
            wait.get(self.deadlines.step)

    def ensure_on_device(self, stage: StageSetup) -> None:
        """Have the trainer on its device, to be saved, loaded or published."""
        self._enter(stage.name, stage.phases[1])

    def begin(self, stage: StageSetup) -> None:
        """Start a stage afresh."""
        self._replica_bytes = None
        self._enter(stage.name, stage.phases[0])
        self.group.begin(stage).get(self.deadlines.step)

    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Supervised steps [start, stop); a record a step."""
        self._enter(stage.name, "train")
        return self._with_shards(
            self.group.train(stage, start, stop), self.deadlines.step.scale_by(stop - start)
        )

    def update(self, beams: GroupFuture, scores: Mapping[str, GroupFuture]) -> dict[str, float]:
        """One RL step on beams and scores that stay where they are; its record. The step is that of the last prompts."""
        if self.at is None:
            raise ConfigError("update wants a step: take prompts from session.prompts(stage) first")
        stage, step = self.at
        self._enter(stage.name, "update")
        weights = self.objectives.weights(step) if self.objectives else None
        version = (self.version,) if stage.mismatch else ()
        update = self.group.update(stage, step, beams, scores, weights, *version)
        record = self._with_shards(update, self.deadlines.step)
        return record | (self.objectives.learn(step, record) if self.objectives else {})

    def counts(self) -> dict[str, dict[str, int]]:
        """What each sparse table did since the last time asked, over all shards; after a step without a call."""
        if self._counts is None:
            self._taken(self.shards.counts().get(self.deadlines.step))
        counts, self._counts = self._counts, None
        return counts or {}

    def replica_bytes(self) -> int:
        """Bytes of the keys and rows that a replica of all tables holds; after a step without a call."""
        if self._replica_bytes is None:
            self._replica_bytes = sum(self.shards.replica_bytes().get(self.deadlines.step))
        return self._replica_bytes

    def fit_memory(self) -> None:
        """Fit the memory's weights to validation events."""
        self._with_shards(self.group.fit_memory(), self.deadlines.step)

    def reshard(self, shards: Sequence[int]) -> int:
        """Move rows until these shards hold all of them; the version of the slice map after it."""
        return self._with_shards(self.group.reshard(shards), self.deadlines.reshard)

    def published(self) -> dict[str, dict[str, int]]:
        """Updates of rows that went to replicas since the processes started: {"full" | "delta": {"updates", "bytes"}}."""
        return sum_shard_counts(self.shards.sent().get(self.deadlines.step))

    def _with_shards(self, work: GroupFuture, timeout_s: Deadline) -> Any:
        """What the trainers answer; the shards serve meanwhile, and say in the same trip what their tables did."""
        serving = [self.shards.serve()] if self.apart else []
        after = self.shards.counts(), self.shards.replica_bytes()
        answer, *_, counts, sizes = get_all(timeout_s, work, *serving, *after)
        self._taken(counts)
        self._replica_bytes = sum(sizes)
        return answer

    def _taken(self, counts: list[dict[str, dict[str, int]]]) -> None:
        """Add what the shards counted to what nobody has asked for yet."""
        self._counts = merge_counts(self._counts or {}, sum_shard_counts(counts))


class EmbeddingHandle:
    """The sparse tables of a run, over all shards. Between steps only: the trainers take part."""

    def __init__(self, trainer: TrainerHandle):
        self._trainer = trainer

    def rows(self) -> list[dict[str, int]]:
        """Rows of each table that each shard holds."""
        return self._trainer.shards.rows().get(self._trainer.deadlines.step)

    def reshard(self, shards: int | Sequence[int]) -> list[dict[str, int]]:
        """Move all rows, with their optimizer state, to these shards evenly (a number: to the first so many), while
        readers go on with the published version; the rows of each shard after it. Raises ConfigError where there are
        not so many shards."""
        world = self._trainer.shards.world
        targets = list(range(shards)) if isinstance(shards, int) else list(shards)
        if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(range(world)):
            raise ConfigError(
                f"reshard wants distinct shards out of the run's {world} (0 to {world - 1}), got {targets}; "
                "start with more: roles.embedding.workers"
            )
        if world > 1:
            self._trainer.reshard(targets)
        return self.rows()


class RolloutHandle:
    """The rollout group. `options`: how each stage rolls out; `chunks`: prompts that a rank computes at once, by stage;
    `between`: groups that beams pass through, in order, by stage."""

    def __init__(
        self,
        group: WorkerGroup,
        options: Mapping[str, Mapping[str, Any]],
        enter: Enter = _nothing,
        deadlines: Deadlines = DEFAULTS,
        chunks: Mapping[str, int | None] | None = None,
        between: Mapping[str, Sequence[WorkerGroup]] | None = None,
    ):
        self.group, self._options, self.version, self._enter = group, options, 0, enter
        self.deadlines, self._chunks = deadlines, dict(chunks or {})
        self._between = dict(between or {})
        self.weights: int | None = (
            None  # the version of the dense weights that were sent to it; None: all are to be sent
        )
        self.holds: int | None = None  # the version of the rows that its replicas hold
        self.owed: list[GroupFuture] = []  # versions that ranks take over when they come to it
        self.absent = 0  # positions that read the default row between the last two versions

    def ensure_on_device(self, stage: str) -> None:
        """Have the rollout on its device in a stage."""
        self._enter(stage, "rollout")

    def generate(self, prompts: Prompts) -> GroupFuture:
        """Beams of the published version for these prompts; a future, nothing passes through here."""
        self.ensure_on_device(prompts.stage)
        request = self._build_request(prompts)
        if prompts.users is None:
            beams = self.group.generate_step(prompts.size, request)
        else:
            beams = self.group.generate(Shard(prompts.users), Shard(prompts.positions), request)
        return self._through(prompts, beams)

    def generate_group(self, rank: int, prompts: Prompts, part: tuple[int, int]) -> GroupFuture:
        """Beams of the published version for `part` = (which, of how many) of a step's prompts, by one rank."""
        answer = self.group.call_rank(
            rank, "generate_group", prompts.size, Replicate(part), self._build_request(prompts)
        )
        return self._through(prompts, answer)

    def _through(self, prompts: Prompts, beams: GroupFuture) -> GroupFuture:
        """Beams after the steps between rollout and rewards."""
        for step in self._between.get(prompts.stage, ()):
            beams = step.apply(beams)
        return beams

    def _build_request(self, prompts: Prompts) -> RolloutRequest:
        """Return how these prompts are answered."""
        options = self._options[prompts.stage]
        return RolloutRequest(
            stage=prompts.stage,
            step=prompts.step,
            width=prompts.width or options["width"],
            version=self.version,
            chunk=self._chunks.get(prompts.stage),
            draw=dict(options) if len(options) > 1 and not prompts.served else {},
            blind=prompts.blind,
        )
