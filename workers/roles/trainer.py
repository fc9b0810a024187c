"""Trainer: the role that learns. It owns the weights, their optimizer, process groups and checkpoints.

What a stage learns from, and how, is in its learner (`StageLearner`): supervised steps from the sequences, RL steps from beams
and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.background import BackgroundWrite, Written, seal_files
from nonet.embedding.exchange import RankLayout
from nonet.embedding.training import ShardedTables, reshard
from nonet.models import build_model
from nonet.models.generation import Voters
from nonet.plugins import load_heavy
from nonet.samples.batches import locate_events
from nonet.workers import BUCKET_BYTES, SHARD_BYTES, OutgoingWeights, SaveOptions, write_base
from nonet.workers.devices import claim, get_device
from nonet.workers.engines import EngineRuntime, StepMeter, make_engine, parse_optimizer_settings
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.learner import LearnerContext, StageLearner
from nonet.workers.roles.memory_fit import MemoryFit
from nonet.workers.roles.settings import RunSetup, StageSetup, UpdateRequest
from nonet.workers.runtime import (
    DistributeWorker,
    Membership,
    PerRank,
    Rendezvous,
    Replicate,
    Shard,
    join_process_group,
    leave_process_group,
    method,
    open_store,
)

# Shapes: U prompts, W beams.


class Trainer(DistributeWorker):
    """One rank of the trainer group."""

    def __init__(self, run: RunSetup):
        self.run = run
        self._member = Membership(0, 1)
        self._store: Any = None
        self._sparse: ShardedTables | None = None
        self._engine: EngineRuntime | None = None
        self._learner: StageLearner | None = None
        self._meter = StepMeter()

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Open the artifacts and build the model, after its process group is joined; what it is (see `_built`)."""
        self.corpus = self.run.corpus(folders)
        model = build_model(self.run.model, self.corpus.codes, self.run.feature_dims(), self.run.seed)
        return self._built(model)

    @method(ttl_steps=Replicate)
    def set_ttl_steps(self, ttl_steps: Mapping[str, int]) -> None:
        """Times to live by table, known once the data is; before a process group is joined."""
        own = {name: {"ttl_steps": steps} for name, steps in ttl_steps.items()}
        tables = {name: {**spec, **own.get(name, {})} for name, spec in self.run.tables.items()}
        self.run = replace(self.run, tables=tables)

    @method(collect="first")
    def host_gang(self) -> tuple[str, int]:
        """Open a rendezvous store on rank 0: (host, port)."""
        if self.rank:
            return "", 0
        host, port, self._store = open_store()
        return host, port

    @method(rendezvous=PerRank)
    def join_process_group(self, rendezvous: Rendezvous) -> None:
        """Join the process group, before there is a model or between stages; fused shards of this process take the same place."""
        claim(self.device)
        kind = get_device(self.device)
        if rendezvous.trainers > 1:  # gradients meet on the device
            kind.check_collectives()
        self._member = join_process_group(
            rendezvous,
            self.rank,
            trainers_backend=kind.get_collective_backends() if rendezvous.trainers > 1 else "gloo",
        )
        if self._engine is not None:
            self._engine.change_process_group(self._member)
        if rendezvous.shards:
            self._sparse = ShardedTables(
                self._specs(),
                seed=self.run.seed,
                layout=RankLayout.separate(self.rank, rendezvous.trainers, rendezvous.shards),
                group=self._member.world_group,
                wire=self.run.wire,
                local=True,
            )
        else:
            self._shard.enter(RankLayout.fused(self.rank, rendezvous.trainers), self._member)

    @method(stage=Replicate)
    def begin(self, stage: StageSetup) -> None:
        """Start a stage with a fresh optimizer and a new learner."""
        self._restart_optimizer(stage)
        self._learner = self._make_learner(stage)
        self._learner.begin()

    @method(collect="first", stage=Replicate)
    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Take the supervised steps [start, stop) of a stage.

        Returns:
            One record per step (`SupervisedLearner.train`).
        """
        return self.learner_of(stage).train(start, stop)

    @method(collect="first", request=Replicate, beams=Shard, scores=Shard)
    def update(
        self, request: UpdateRequest, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Take one RL step on this rank's share of the prompts.

        Args:
            request: Stage, step and weights of the rewards.
            beams: Rollouts on the wire.
            scores: Scores [U, W] by reward. A prompt whose row is NaN is left out.

        Returns:
            The record of the step: loss, kl, clipped, ratio, what the algorithm reports besides, flat_groups, no_hit (share of
            groups without what their user took next), prompts, exact entropy and kl_exact of a few prompts, the mean score per
            beam of each reward as `reward.<name>`, their weighted sum as `reward`, lr, norm and seconds.
        """
        return self.learner_of(request.stage).update(request, beams, scores)

    @method(collect="sum", beams=Shard, while_offloaded=True)
    def hits(self, beams: Mapping[str, Any]) -> np.ndarray:
        """[prompts with what their user took next among their beams, prompts]."""
        seq = self.corpus.seq
        target = seq.item[locate_events(seq, beams["user"], beams["position"])]
        hit = ((beams["item"] == target[:, None]) & beams["valid"]).any(1)
        return np.array([hit.sum(), len(hit)], np.float64)

    @method()
    def fit_memory(self) -> None:
        """Fit the memory's weights to validation events; all ranks take part."""
        context = self._context()
        if context.voters is not None:
            context.read_items()
            MemoryFit(
                self.run, self.corpus, self.model, self.sparse, self._member, context.voters, self.device
            ).set()
            self.corpus.release_pages()

    @method(collect="first", shards=Replicate)
    def reshard(self, shards: Sequence[int]) -> int:
        """Move rows, between steps, until these shards hold all of them evenly; the version of the slice map after it."""
        for _ in reshard(self.sparse, shards):
            pass
        self.sparse.stop()
        return self.sparse.slices.version

    @method(collect="first")
    def weights(self, bucket: int, version: int = 0, base: int | None = None) -> np.ndarray:
        """One of the buckets of the dense weights as a version, bytes [B] from rank 0; `base`: the version that readers have,
        where only what changed since then is sent."""
        tensors = self.dense.gather_weights(self._outgoing.list_tensor_names(bucket))
        if self.rank:
            return np.empty(0, np.uint8)
        return self._outgoing.pack_bucket(bucket, tensors, version, base)

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write folder/dense/, in RL folder/reference/, and the source's state, as they are at this call; the answer of `saved`.

        Where nobody waits, what there is is copied to the host, then written on a thread beside later steps; else it is written
        as it lies.
        """
        saving = SaveOptions(not wait, self.run.weights.get("shard", SHARD_BYTES))
        top, parts = Path(folder), self._parts(saving)
        self._saving = BackgroundWrite(
            top, "dense weights", lambda: seal_files(top, [path for write in parts for path in write(top)])
        )
        return self.saved(wait)

    @method(while_offloaded=True)
    def saved(self, wait: bool = False) -> Written | None:
        """What the last save wrote; None while it is being written and nobody waits. Raises what stopped it."""
        return self._saving.poll_result(wait, self.run.deadlines.save)

    def _parts(self, saving: SaveOptions) -> list[Callable[[Path], list[Path]]]:
        """What this rank adds to a commit: each is called with the commit's folder and says what it wrote."""
        dense = self.dense.snapshot(saving)
        parts: list[Callable[[Path], list[Path]]] = [lambda folder: dense(folder / "dense")]
        if self.rank == 0 and (sha256 := getattr(self.model, "base_sha256", None)) is not None:
            parts.append(partial(write_base, sha256))
        return parts + (self._learner.checkpoint_parts(saving) if self._learner is not None else [])

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return by join of `data.join` the rows that were looked up and found since the last call."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(stage=Replicate)
    def load(self, folder: str, stage: StageSetup | None = None) -> None:
        """Read a checkpoint: the weights, and with `stage` also the optimizer and the learner of that stage, to continue it."""
        if stage is not None:
            self._restart_optimizer(stage)
        self.dense.load(Path(folder) / "dense", optimizer=stage is not None)
        self._learner = None if stage is None else self._make_learner(stage)
        if self._learner is not None:
            self._learner.restore(Path(folder))

    def device_tensors(self) -> Iterable[Tensor]:
        """Return model, gradients, optimizer and what the stage keeps besides; sparse rows are in host memory."""
        if self._engine is None:
            return []
        stage_tensors = self._learner.device_tensors() if self._learner is not None else []
        return [*self._engine.device_tensors(), *stage_tensors]

    def teardown(self) -> None:
        leave_process_group(self._member)

    def _built(self, model: torch.nn.Module) -> dict[str, Any]:
        """Hand a model to the engine: its parameters, the buckets that its weights are published in, and notes for the user."""
        parameters = sum(p.numel() for p in model.parameters())
        self._engine = make_engine(self.run.engine, model.to(claim(self.device)), self._member)
        self._meter.watch(self._engine.model)
        how = self.run.weights
        block = how["block"] if how.get("publish") == "delta" else 0
        self._outgoing = OutgoingWeights(
            self._engine.describe_weights(), how.get("bucket", BUCKET_BYTES), block
        )
        built: dict[str, Any] = {"parameters": parameters, "buckets": len(self._outgoing.buckets)}
        slow = getattr(model, "no_cache", None)
        return built | ({"notes": [f"beams read every history again at each code: {slow}"]} if slow else {})

    @property
    def dense(self) -> EngineRuntime:
        """The model's dense part, which the engine steps."""
        assert self._engine is not None, "open comes first"
        return self._engine

    @property
    def model(self) -> Any:
        """What losses are computed with."""
        return self.dense.model

    @property
    def sparse(self) -> ShardedTables:
        """This rank's part of the sparse world: a fused shard's, or its own as a trainer apart."""
        return self._sparse or self._shard.sparse

    @property
    def _shard(self) -> EmbeddingShard:
        return self.place.peers["embedding"]

    def _specs(self) -> dict[str, Any]:
        return self.run.specs()

    def _restart_optimizer(self, stage: StageSetup) -> None:
        """Begin the optimizer that the stage names."""
        self.dense.learning = parse_optimizer_settings(stage.optimizer)
        self.dense.restart()

    def learner_of(self, stage: StageSetup) -> StageLearner:
        """Return the learner of the stage under way."""
        if self._learner is None or self._learner.stage != stage:
            self._learner = self._make_learner(stage)
        return self._learner

    def _make_learner(self, stage: StageSetup) -> StageLearner:
        """Create the learner that the stage names, or the model's where it names none."""
        return load_heavy(stage.learner)(self._context(), stage)

    def _context(self) -> LearnerContext:
        """Return what a learner shares with this trainer."""
        return LearnerContext(
            run=self.run,
            corpus=self.corpus,
            dense=self.dense,
            sparse=self.sparse,
            member=self._member,
            voters=self._voters,
            device=self.device,
            meter=self._meter,
            rank=self.rank,
            world=self.world,
        )

    @cached_property
    def _voters(self) -> Voters | None:
        return self.run.voters(self.corpus)
