"""Trainer: the role that trains the model. It owns the weights, their optimizer, process groups and checkpoints.

A stage's samples and losses are defined by its learner (`StageLearner`): supervised learners read the sequences, RL learners
receive beams and scores.
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
from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.generation import Voters
from nonet.plugins import load_heavy
from nonet.samples.batches import locate_events
from nonet.workers import OutgoingWeights, SaveOptions, write_base
from nonet.workers.devices import claim, get_device
from nonet.workers.engines import EngineRuntime, StepMeter, build_engine, get_axes
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
    StoreAddress,
    close_store,
    method,
    open_store,
)
from nonet.workers.runtime.rendezvous import join_process_group, leave_process_group

# Shapes: U prompts, W beams.


class Trainer(DistributeWorker):
    """One rank of the trainer group."""

    def __init__(self, run: RunSetup):
        self.run = run
        self._member = Membership(0, 1)
        self._store: StoreAddress | None = None  # The rendezvous store that this process holds.
        self._sparse: ShardedTables | None = (
            None  # A client of shards in separate processes; None if they are fused.
        )
        self._engine: EngineRuntime | None = None
        self._learner: StageLearner | None = None
        self._meter = StepMeter()

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Open the artifacts and build the model, after the process group is joined.

        Returns:
            "parameters": number of dense parameters, "buckets": number of buckets of the weights, and "notes" for the user, if
            any.
        """
        self.corpus = self.run.open_corpus(folders)
        run, codes = self.run, self.corpus.codes
        return self._build_engine(lambda: build_model(run.model, codes, run.get_feature_dims(), run.seed))

    @method(ttl_steps=Replicate)
    def set_ttl_steps(self, ttl_steps: Mapping[str, int]) -> None:
        """Set the times to live of tables, in steps, which depend on the data; call this before `join_process_group`."""
        ttl_by_table = {name: {"ttl_steps": steps} for name, steps in ttl_steps.items()}
        tables = {name: {**spec, **ttl_by_table.get(name, {})} for name, spec in self.run.tables.items()}
        self.run = replace(self.run, tables=tables)

    @method(collect="first")
    def open_rendezvous(self) -> StoreAddress | None:
        """Open a rendezvous store on rank 0, in place of an older one, and return its address; None on other ranks."""
        if self.rank:
            return None
        if self._store is not None:
            close_store(self._store)
        self._store = open_store()
        return self._store

    @method(rendezvous=PerRank)
    def join_process_group(self, rendezvous: Rendezvous) -> None:
        """Join the process group, either before the model is built or between stages.

        Shards that are fused with this process join with it.
        """
        claim(self.device)
        trainers_backend = "gloo"
        if rendezvous.trainers > 1:  # Several trainers reduce gradients on the device.
            device_kind = get_device(self.device)
            device_kind.check_collectives()
            trainers_backend = device_kind.get_collective_backends()
        self._member = join_process_group(
            rendezvous,
            self.rank,
            trainers_backend=trainers_backend,
            tensor=get_axes(self.run.engine).get("tensor", 1),
        )
        if self._engine is not None:
            model = self._engine.model
            self._engine.change_process_group(self._member)
            if self._engine.model is not model:
                self._meter.watch(self._engine.model, self._member.tensor)
        if rendezvous.shards:
            self._sparse = ShardedTables(
                self._make_table_specs(),
                seed=self.run.seed,
                layout=RankLayout.separate(self.rank, rendezvous.trainers, rendezvous.shards),
                group=self._member.world_group,
                wire=self.run.wire,
                local=True,
            )
        else:
            self._shard.set_layout(RankLayout.fused(self.rank, rendezvous.trainers), self._member)

    @method(stage=Replicate)
    def begin(self, stage: StageSetup) -> None:
        """Start a stage with a fresh optimizer, or that of the checkpoint that it continues, and a new learner."""
        self._restart_optimizer(stage)
        if stage.continues:
            self.dense.load(Path(stage.continues) / "dense", optimizer=True)
        self._learner = self._make_learner(stage)
        self._learner.begin()

    @method(collect="first", stage=Replicate)
    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Take the supervised steps [start, stop) of a stage.

        Returns:
            One record per step (`SupervisedLearner.train`).
        """
        return self.get_learner(stage).train(start, stop)

    @method(collect="first", request=Replicate, beams=Shard, scores=Shard)
    def update(
        self, request: UpdateRequest, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Take one RL step on this rank's share of the prompts.

        Args:
            request: Stage, step and weights of the rewards.
            beams: Rollouts as encoded by `to_wire`.
            scores: Scores [U, W] by reward. A prompt whose row is NaN is not used.

        Returns:
            The record of the step: loss, kl, clipped, ratio, the algorithm's own metrics, flat_groups, no_hit (share of
            groups without their user's next item), prompts, exact entropy and kl_exact of a few prompts, the mean score per
            beam of each reward as `reward.<name>`, their weighted sum as `reward`, lr, norm and seconds.
        """
        return self.get_learner(request.stage).update(request, beams, scores)

    @method(collect="sum", beams=Shard, while_offloaded=True)
    def count_hits(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Return the number of prompts whose target is among their beams, and the number of prompts, [2] float64."""
        seq = self.corpus.seq
        target_U = seq.item[locate_events(seq, beams["user"], beams["position"])]
        hit_U = ((beams["item"] == target_U[:, None]) & beams["valid"]).any(1)
        return np.array([hit_U.sum(), len(hit_U)], np.float64)

    @method()
    def fit_memory(self) -> None:
        """Fit the weights of the memory's voters to validation events. All ranks must call this method."""
        context = self._make_context()
        if context.voters is not None:
            context.read_items()
            MemoryFit(
                self.run, self.corpus, self.model, context.tables, self._member, context.voters, self.device
            ).fit_model()
            self.corpus.release_pages()

    @method(collect="first", shards=Replicate)
    def reshard(self, shards: Sequence[int]) -> int:
        """Move sparse rows until they are spread evenly over the given shards; no step may be running.

        Args:
            shards: Ranks of the shards among which the rows are divided.

        Returns:
            The version of the slice map after the move.
        """
        for _ in reshard(self.sparse, shards):  # Each iteration moves one part of the rows.
            pass
        self.sparse.stop()
        return self.sparse.slices.version

    @method(collect="first")
    def export_weights(self, bucket: int, version: int = 0, base: int | None = None) -> np.ndarray:
        """Return one bucket of the dense weights as bytes [B] from rank 0; empty on other ranks.

        Args:
            bucket: Index of the bucket.
            version: Version under which the weights are published.
            base: Version that the readers have, to send only the changes since then; None to send everything.
        """
        tensors = self.dense.gather_weights(self._outgoing.list_tensor_names(bucket))
        if self.rank:
            return np.empty(0, np.uint8)
        return self._outgoing.pack_bucket(bucket, tensors, version, base)

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write the current state to a checkpoint: dense weights, the learner's state, and the state of the sample source.

        If `wait` is false, the state is copied to the host, and a thread writes it while later steps run. Otherwise it is
        written without a copy.

        Args:
            folder: Folder of the checkpoint.
            wait: Whether to wait until the files are written.

        Returns:
            The result of `poll_save`.
        """
        checkpoint = Path(folder)
        writers = self._list_checkpoint_parts(SaveOptions(copy=not wait, shard_bytes=self.run.weights.shard))

        def write_all() -> Written:
            return seal_files(checkpoint, [path for write in writers for path in write(checkpoint)])

        self._saving = BackgroundWrite(checkpoint, "dense weights", write_all)
        return self.poll_save(wait)

    @method(while_offloaded=True)
    def poll_save(self, wait: bool = False) -> Written | None:
        """Return the files that the last save wrote; None if it is still running and `wait` is false.

        Raises the error of a save that failed.
        """
        return self._saving.poll_result(wait, self.run.deadlines.save)

    def _list_checkpoint_parts(self, saving: SaveOptions) -> list[Callable[[Path], list[Path]]]:
        """Return functions that write this rank's parts into a checkpoint folder and return the paths that they wrote."""
        write_dense = self.dense.snapshot(saving)
        writers: list[Callable[[Path], list[Path]]] = [lambda folder: write_dense(folder / "dense")]
        if self.rank == 0 and (sha256 := getattr(self.model, "base_sha256", None)) is not None:
            writers.append(partial(write_base, sha256))
        if self._learner is not None:
            writers += self._learner.list_divided_parts(saving)
            if self._member.leads_tensor_group:
                writers += self._learner.list_checkpoint_parts(saving)
        return writers

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return the numbers of rows that each join of `data.join` has looked up and found since the last call."""
        if not self.corpus.joins or not self._member.leads_tensor_group:
            return {}
        return self.corpus.joins.pop_counts()

    @method(stage=Replicate)
    def load(self, folder: str, stage: StageSetup | None = None) -> None:
        """Load a checkpoint.

        Args:
            folder: Folder of the checkpoint.
            stage: Stage to continue, whose optimizer and learner are also restored; None to load only the weights.
        """
        if stage is not None:
            self._restart_optimizer(stage)
        self.dense.load(Path(folder) / "dense", optimizer=stage is not None)
        self._learner = None if stage is None else self._make_learner(stage)
        if self._learner is not None:
            self._learner.restore(Path(folder))

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the model, gradients, optimizer and the stage's tensors on the device. Sparse rows are in host memory."""
        if self._engine is None:
            return []
        stage_tensors = self._learner.device_tensors() if self._learner is not None else []
        return [*self._engine.device_tensors(), *stage_tensors]

    def teardown(self) -> None:
        """Leave the process group."""
        leave_process_group(self._member)

    def _build_engine(self, build: Callable[[], torch.nn.Module]) -> dict[str, Any]:
        """Create the engine of a model and the buckets in which its weights are published, and return the result of `open`."""
        self._engine = build_engine(self.run.engine, build, torch.device(claim(self.device)), self._member)
        model = self._engine.model
        weights = self._engine.describe_weights()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        whole = {**trained, **weights}
        parameter_count = sum(whole[name].numel() for name in trained)
        self._meter.watch(model, self._member.tensor)
        publishing = self.run.weights
        block_bytes = publishing.block if publishing.publish == "delta" else 0
        self._outgoing = OutgoingWeights(weights, publishing.bucket, block_bytes)
        built: dict[str, Any] = {"parameters": parameter_count, "buckets": len(self._outgoing.buckets)}
        if no_cache_reason := getattr(model, "no_cache", None):
            built["notes"] = [
                f"the model computes the whole history again for each code of a beam: {no_cache_reason}"
            ]
        return built

    @property
    def dense(self) -> EngineRuntime:
        """The engine that holds and updates the dense weights."""
        assert self._engine is not None, "open comes first"
        return self._engine

    @property
    def model(self) -> Any:
        """The module that computes losses (the sharded or wrapped model)."""
        return self.dense.model

    @property
    def sparse(self) -> ShardedTables:
        """The sparse tables: those of the fused shard, or a client of shards in separate processes."""
        return self._sparse or self._shard.sparse

    @property
    def ranks_per_share(self) -> int:
        """The number of neighbouring ranks that compute the same samples: those of a tensor group."""
        return self._member.tensor

    @property
    def _shard(self) -> EmbeddingShard:
        return self.place.peers["embedding"]

    def _make_table_specs(self) -> dict[str, Any]:
        return self.run.make_table_specs()

    def _restart_optimizer(self, stage: StageSetup) -> None:
        """Create the optimizer that the stage names, with empty state."""
        self.dense.learning = stage.optimizer
        self.dense.restart()

    def get_learner(self, stage: StageSetup) -> StageLearner:
        """Return the learner of a stage that has begun.

        Raises:
            ConfigError: The current stage is another one, or has other settings.
        """
        if self._learner is None or self._learner.stage != stage:
            raise ConfigError(
                f"trainer-{self.rank} has not begun stage {stage.name!r} with these settings: call begin(stage), or load(folder, "
                "stage) to continue it"
            )
        return self._learner

    def _make_learner(self, stage: StageSetup) -> StageLearner:
        """Create the learner that the stage names."""
        return load_heavy(stage.learner)(self._make_context(), stage)

    def _make_context(self) -> LearnerContext:
        """Return the objects that a learner shares with this trainer."""
        return LearnerContext(
            run=self.run,
            corpus=self.corpus,
            dense=self.dense,
            sparse=self.sparse,
            member=self._member,
            voters=self._voters,
            device=self.device,
            meter=self._meter,
            rank=self.rank // self.ranks_per_share,
            world=self.world // self.ranks_per_share,
        )

    @cached_property
    def _voters(self) -> Voters | None:
        return self.run.make_voters(self.corpus)
