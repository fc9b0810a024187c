"""Trainer: the role that learns; supervised steps from the sequences, RL steps from beams and scores.

A step is lease (a pure function of the step number), gradients, dense step, sparse apply. Every rank works on its share
of the step's rows, a bounded chunk at a time; losses are divided by the global count of targets. The sparse rows are frozen
during RL unless a stage has a `sparse_lr`; its reference keeps the rows that change, as they were.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.background import Writing, Written, sealed
from nonet.embedding.exchange import Layout
from nonet.embedding.training import PrefetchPipeline, ShardedTables, reshard
from nonet.errors import CheckpointError, DataError
from nonet.models import build_model
from nonet.models.generation import Voters
from nonet.random import key
from nonet.rl import Critic
from nonet.samples.batches import event_at
from nonet.samples.ledger import Ledger, has_ledger, write_notes, write_snapshot
from nonet.samples.sources import (
    Counted,
    RlPrompts,
    RlTargets,
    SampleRequest,
    Samples,
    has_states,
    open_source,
    read_state,
    write_state,
)
from nonet.workers import (
    BUCKET_BYTES,
    SHARD_BYTES,
    FrozenPolicy,
    Outgoing,
    Saving,
    Share,
    host_copy,
    load_model,
    read_tensors,
    write_base,
    write_tensors,
)
from nonet.workers.devices import claim, device, tensors_of
from nonet.workers.engines import (
    EngineRuntime,
    Meter,
    Precision,
    all_finite,
    cut,
    gradients_of,
    learning_of,
    make_engine,
    matmul_rate,
    norm_of_rows,
    poison,
    skip_step,
    write_precision,
)
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.memory_fit import MemoryFit
from nonet.workers.roles.policy_update import PolicyUpdate, needs_reference, value_rate
from nonet.workers.roles.settings import LearningRate, RunSetup, StageSetup
from nonet.workers.roles.supervised_update import SupervisedUpdate
from nonet.workers.runtime import (
    DistributeWorker,
    Membership,
    PerRank,
    Rendezvous,
    Replicate,
    Shard,
    join_process_group,
    leave,
    method,
    open_store,
)

# Batches in flight where rows travel: `bench embedding` hides 80 % of the shorter side with three.
IN_FLIGHT = 3

_APART = 3
_PAGES_EVERY = 64  # steps between which mapped pages of the log stay

REFERENCE_ROWS = (
    "rows.safetensors"  # of a checkpoint's reference: sparse rows that the stage has changed, as they were
)

# Shapes: U prompts, W beams, L levels, N events, M unique keys, D width.


class Trainer(DistributeWorker):
    """One rank of the trainer group."""

    def __init__(self, run: RunSetup):
        self.run = run
        self._member = Membership(0, 1)
        self._store: Any = None
        self._sparse: ShardedTables | None = None
        self._reference: FrozenPolicy | None = None
        self._critic: Critic | None = None
        self._engine: EngineRuntime | None = None
        self._began = 0.0
        self._pipeline: PrefetchPipeline | None = None
        self._opened: tuple[StageSetup, Samples] | None = None
        self._prompts: tuple[StageSetup, RlPrompts] | None = None
        self._update: SupervisedUpdate | None = None
        self._versions: dict[int, FrozenPolicy] = {}
        self._skipped = 0  # steps in a row that were skipped, for a loss or gradient was not finite
        self._apart = 0  # steps in a row that were not learned from, for rollouts computed otherwise
        self._meter = Meter()
        self._computes: tuple[StageSetup, Precision] | None = None
        self._near = False  # whether nearest items vote by the rows of the stage under way

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
        kind = device(self.device)
        if rendezvous.trainers > 1:  # gradients meet on the device
            kind.check_collectives()
        self._member = join_process_group(
            rendezvous, self.rank, trainers_backend=kind.collectives() if rendezvous.trainers > 1 else "gloo"
        )
        if self._engine is not None:
            self._engine.change_process_group(self._member)
        if rendezvous.shards:
            self._sparse = ShardedTables(
                self._specs(),
                seed=self.run.seed,
                layout=Layout.apart(self.rank, rendezvous.trainers, rendezvous.shards),
                group=self._member.world_group,
                wire=self.run.wire,
                local=True,
            )
        else:
            self._shard.enter(Layout.fused(self.rank, rendezvous.trainers), self._member)

    @method(stage=Replicate)
    def begin(self, stage: StageSetup) -> None:
        """Start a stage: a fresh optimizer and the source from its start; for RL also the reference and the value head."""
        self._opened = self._prompts = self._update = self._computes = None
        self._near, self._apart, self._skipped = False, 0, 0
        self._versions = {}
        self.dense.learning = learning_of(stage.optimizer)
        self.dense.restart()
        self._reference = self._frozen() if needs_reference(stage) else None
        self._critic = self._new_critic(stage)

    @method(collect="first", stage=Replicate)
    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Supervised steps [start, stop) of a stage; a record a step: loss (nats a target), events, lr, norm, seconds,
        and how many of those it `waited` for its samples."""
        matmul_rate(self.device, stage.precision.get("use", "fp32"))  # measured once, before the clock starts
        self._began = time.perf_counter()
        self._meter.taken()
        self._pipeline = pipeline = PrefetchPipeline(
            self.sparse,
            lambda step: self._read(stage, step),
            lambda read: read.keys,
            lambda step, read, rows: self._computed(stage, step, read, rows),
            depth=self.run.in_flight or (IN_FLIGHT if self.sparse.layout.world > 1 or self.run.joins else 1),
            step=lambda step: stage.first + step + 1,
            lr=lambda step, table: self._table_lr(stage, step, table),
            timeout_s=self.run.deadlines.step.times(2),
            learns=not stage.frozen_rows,
        )
        records = pipeline.run(start, stop)
        self.sparse.stop()
        if start // _PAGES_EVERY != stop // _PAGES_EVERY:
            self.corpus.let_go()
        return records

    @method(collect="first", stage=Replicate, beams=Shard, scores=Shard, weights=Replicate)
    def update(
        self,
        stage: StageSetup,
        step: int,
        beams: Mapping[str, Any],
        scores: Mapping[str, np.ndarray],
        weights: Mapping[str, float] | None = None,
        version: int | None = None,
    ) -> dict[str, float]:
        """One RL step on this rank's share of the prompts: beams (Rollouts on the wire) and scores [U, W] by reward, a row of
        NaN where a prompt has none: it is left out. `weights`: what rewards count now, by default what the stage says;
        `version`: what the weights of before the step were published as, where `mismatch` is measured.

        Its record: loss, kl, clipped, ratio, what its algorithm reports besides, flat_groups, no_hit (share of groups without
        what their user took next), prompts, exact entropy and kl_exact of a few prompts, each reward's mean score a beam as
        `reward.<name>`, the weighted sum of them as `reward`, lr, norm and seconds.
        """
        if not self._near:
            self._read_items()
        policy = PolicyUpdate(
            self.run,
            stage if weights is None else replace(stage, weights=weights),
            self.corpus,
            self.dense,
            self.sparse,
            self._member,
            self._reference,
            self._voters,
            self.device,
            self._critic,
            self._as_published(stage, version),
            self._meter,
        )
        self._meter.taken()
        record = policy.step(step, beams, scores)
        self._check_apart(record)
        self._skipped = self._skipped + 1 if record.get("skipped") and record["norm"] == 0.0 else 0
        record |= {"skipped_in_a_row": float(self._skipped)} if self._skipped else {}
        record |= self._measured(stage)
        self._move_reference(stage, step)
        self._near = self._near and stage.sparse_lr is None
        self._prompts_of(stage).applied(step, beams["user"], beams["position"])
        return record

    def _as_published(self, stage: StageSetup, version: int | None) -> dict[int, FrozenPolicy]:
        """Return policies by the version that they were published as, back to the oldest that beams may come from."""
        stale = int(stage.mismatch.get("staleness", 0))
        if version is None or not stale:
            return {}
        self._versions[version] = self._frozen()
        self._versions = {each: model for each, model in self._versions.items() if each >= version - stale}
        return self._versions

    def _check_apart(self, record: Mapping[str, float]) -> None:
        """Raise DataError where rollout and trainer were too far apart in so many steps in a row."""
        self._apart = self._apart + 1 if record.get("mismatch/stopped") else 0
        if self._apart >= _APART:
            raise DataError(
                f"rollout and trainer differed by {record['mismatch/kl']:.3g} nats a level in {_APART} steps in a row, more than "
                "mismatch.stop_at_kl: nothing was learned from them. Do both read the same weights and rows? Else raise it"
            )

    @method(collect="sum", beams=Shard, away=True)
    def hits(self, beams: Mapping[str, Any]) -> np.ndarray:
        """[prompts with what their user took next among their beams, prompts]."""
        seq = self.corpus.seq
        target = seq.item[event_at(seq, beams["user"], beams["position"])]
        hit = ((beams["item"] == target[:, None]) & beams["valid"]).any(1)
        return np.array([hit.sum(), len(hit)], np.float64)

    @method()
    def fit_memory(self) -> None:
        """Fit the memory's weights to validation events; all ranks take part."""
        if self._voters is not None:
            self._read_items()
            MemoryFit(
                self.run, self.corpus, self.model, self.sparse, self._member, self._voters, self.device
            ).set()
            self.corpus.let_go()

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
        tensors = self.dense.tensors(self._outgoing.names(bucket))
        if self.rank:
            return np.empty(0, np.uint8)
        return self._outgoing.packed(bucket, tensors, version, base)

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write folder/dense/, in RL folder/reference/, and the source's state, as they are at this call; the answer of `saved`.

        Where nobody waits, what there is is copied to the host, then written on a thread beside later steps; else it is written
        as it lies.
        """
        saving = Saving(not wait, self.run.weights.get("shard", SHARD_BYTES))
        top, parts = Path(folder), self._parts(saving)
        self._saving = Writing(
            top, "dense weights", lambda: sealed(top, [path for write in parts for path in write(top)])
        )
        return self.saved(wait)

    @method(away=True)
    def saved(self, wait: bool = False) -> Written | None:
        """What the last save wrote; None while it is being written and nobody waits. Raises what stopped it."""
        return self._saving.answer(wait, self.run.deadlines.save)

    def _parts(self, saving: Saving) -> list[Callable[[Path], list[Path]]]:
        """What this rank adds to a commit: each is called with the commit's folder and says what it wrote."""
        dense = self.dense.snapshot(saving)
        parts: list[Callable[[Path], list[Path]]] = [lambda folder: dense(folder / "dense")]
        if self.rank == 0 and (sha256 := getattr(self.model, "base_sha256", None)) is not None:
            parts.append(partial(write_base, sha256))
        if self._reference is not None and self.rank == 0:
            parts.append(partial(_write, "reference", host_copy(self._reference.model.state_dict())))
            rows = host_copy(self._reference.row_tensors())
            if rows:
                parts.append(partial(_write, "reference", rows, name=REFERENCE_ROWS))
        if self._critic is not None and self.rank == 0:
            parts.append(partial(_write, "critic", host_copy(self._critic.tensors())))
        if self.rank == 0 and self._computes is not None and (state := self._computes[1].state()):
            parts.append(partial(write_precision, state))
        if (ledger := self._ledger()) is not None:
            noted = partial(write_notes, ledger.notes(), self.rank)
            parts.append(noted if self.rank else partial(write_snapshot, ledger.snapshot()))
        if self._opened is not None and (state := self._opened[1].state()):
            parts.append(partial(write_state, json.dumps(dict(state)), self.rank, self.world))
        return parts

    @method(away=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return by join of `data.join` the rows that were looked up and found since the last call."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(stage=Replicate)
    def load(self, folder: str, stage: StageSetup | None = None) -> None:
        """Read a commit; `stage` when that stage goes on from it (optimizer and reference too)."""
        if stage is not None:
            self.dense.learning = learning_of(stage.optimizer)
            self.dense.restart()
            self._update = self._computes = None
            self._precision(stage).load(Path(folder))
        self.dense.load(Path(folder) / "dense", optimizer=stage is not None)
        self._near = False
        if stage is not None and has_states(folder):
            self._opened = None
            self._samples(stage).restore(read_state(folder, self.rank, self.world))
        self._prompts = None
        if stage is not None and has_ledger(folder):
            self._opened = None
            ledger = self._prompts_of(stage).ledger if stage.rolls_out else self._ledger(stage)
            if ledger is not None:
                ledger.load(Path(folder), self.rank)
        if stage is not None and needs_reference(stage):
            self._reference = self._frozen()
            load_model(self._reference.model, Path(folder) / "reference")
            self._load_reference_rows(Path(folder), stage)
        self._critic = self._new_critic(stage) if stage is not None else None
        if self._critic is not None:
            self._critic.load(read_tensors(Path(folder) / "critic" / "model.safetensors"))

    def device_tensors(self) -> Iterable[Tensor]:
        """Model, gradients, optimizer and reference; the sparse rows live in host memory."""
        if self._engine is None:
            return []
        mine = list(self._engine.device_tensors())
        return mine + (tensors_of(self._reference.model) if self._reference is not None else [])

    def teardown(self) -> None:
        leave(self._member)

    def _built(self, model: torch.nn.Module) -> dict[str, Any]:
        """Hand a model to the engine: its parameters, the buckets that its weights are published in, and notes for the user."""
        parameters = sum(p.numel() for p in model.parameters())
        self._engine = make_engine(self.run.engine, model.to(claim(self.device)), self._member)
        self._meter.watch(self._engine.model)
        how = self.run.weights
        block = how["block"] if how.get("publish") == "delta" else 0
        self._outgoing = Outgoing(self._engine.outline(), how.get("bucket", BUCKET_BYTES), block)
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

    def _frozen(self) -> FrozenPolicy:
        """Return the policy as it is now, to be compared with later."""
        return FrozenPolicy(copy.deepcopy(self.model).eval().requires_grad_(False))

    def _load_reference_rows(self, folder: Path, stage: StageSetup) -> None:
        """Read the reference's rows of a checkpoint.

        Raises:
            CheckpointError: The stage has moved rows, and the checkpoint was written by a version that did not store what they
                were before.
        """
        assert self._reference is not None
        path = folder / "reference" / REFERENCE_ROWS
        if path.exists():
            self._reference.load_rows(read_tensors(path), self.device)
        elif stage.sparse_lr is not None:
            raise CheckpointError(
                f"{folder} has no {path.relative_to(folder)}: it was written inside a stage with sparse_lr by a version that did "
                "not store the reference's sparse rows, so its KL term cannot be computed; start the run again"
            )

    def _new_critic(self, stage: StageSetup) -> Critic | None:
        """The value head of a stage whose algorithm has one."""
        rate = value_rate(stage)
        return Critic(self.model.width, self.corpus.codes, rate, claim(self.device)) if rate else None

    def _move_reference(self, stage: StageSetup, step: int) -> None:
        """Make the policy the reference every so many steps, where the stage's algorithm says so."""
        how = stage.algorithm.get("reference")
        if self._reference is None or not isinstance(how, Mapping):
            return
        if how.get("every") and (step + 1) % how["every"] == 0:
            self._reference = self._frozen()

    def _read(self, stage: StageSetup, step: int) -> Any:
        """This rank's part of a step, with the keys it asks for."""
        makes = self._samples(stage).batch(step, self.rank, self.world)
        return Share(makes, self.run.features, self.device, self._supervised(stage).negatives(step))

    def _computed(
        self, stage: StageSetup, step: int, read: Any, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        """One dense step on rows [M, D] by table; their gradients, None where it was skipped, and the step's record."""
        self.model.train()
        with self._meter.part("dense"):
            grads, sums = self._supervised(stage).gradients(
                read, rows, lambda number: self._draw_dropout(stage, step, number)
            )
            sums |= self._supervised(stage).aligned(step)
        grads, record = self._stepped(stage, step, sums["loss"], sums["events"], read.keys, grads)
        return None if stage.frozen_rows else grads, sums | record

    def _supervised(self, stage: StageSetup) -> SupervisedUpdate:
        """The updates of the stage under way."""
        if self._update is None or self._update.stage != stage:
            self._update = SupervisedUpdate(
                self.run,
                stage,
                self.corpus,
                self.dense,
                self._member,
                self._voters,
                self.device,
                self._precision(stage),
            )
        return self._update

    def _precision(self, stage: StageSetup) -> Precision:
        """Of the stage under way."""
        if self._computes is None or self._computes[0] != stage:
            self._computes = stage, Precision(**stage.precision)
        return self._computes[1]

    def _stepped(
        self,
        stage: StageSetup,
        step: int,
        loss: float,
        events: float,
        keys: Mapping[str, Tensor],
        grads: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        """Take the dense step, or skip it where fp16 overflowed; gradients of the rows, which then are none, and the record. Its
        seconds are since the record before."""
        lr = LearningRate(**stage.lr).at(step, stage.steps)
        precision, scale = self._precision(stage), {}
        if not all_finite(
            [torch.tensor(loss), *grads.values()]
        ):  # of one rank: its gradients tell the others
            poison(self._dense_gradients())
        finite = precision.unscaled(self._dense_gradients()) & precision.unscaled(grads.values())
        moves = not precision.scales or self._member.total(float(not finite))[0] == 0.0
        if precision.scales:
            scale = {"scale": precision.scale, "skipped": float(not moves)}
        precision.after(moves)
        overflows = not moves and math.isfinite(loss) and precision.scale > 1  # a smaller scale may do
        norm = self._clipped(keys, grads) if moves else math.inf
        moves = math.isfinite(norm)
        if moves:
            with self._meter.part("optimizer"):
                self.dense.step(lr)
        else:
            skip_step(self.dense)
            scale |= {"skipped": 1.0}
        self._skipped = 0 if moves or overflows else self._skipped + 1
        if self._skipped:
            scale["skipped_in_a_row"] = float(self._skipped)
        if (ledger := self._ledger()) is not None:
            ledger.apply_step(step)
        before, self._began = self._began, time.perf_counter()
        waited = self._pipeline.waited_s if self._pipeline else 0.0
        seconds = {"seconds": self._began - before, "waited": waited, **self._measured(stage)}
        record = {
            "loss": loss,
            "events": events,
            "lr": lr,
            "norm": norm if moves else 0.0,
            **scale,
            **seconds,
        }
        return grads if moves else None, record

    def _clipped(self, keys: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> float:
        """Cut the gradients, of rows too where the stage says so; the norm before, not finite where one of them is not."""
        learning = self.dense.learning
        with self._meter.part("communication"):
            if not learning.clip_rows:
                return self.dense.clip()
            norm = self.dense.clip(norm_of_rows(keys, grads, self._member))
            torch._foreach_mul_(list(grads.values()), cut(norm, learning.clip_norm))
            return norm

    def _measured(self, stage: StageSetup) -> dict[str, float]:
        """What the meter counted since the record before, and what the device does of matrix products."""
        if self._pipeline is not None:
            self._meter.spent("sparse", self._pipeline.sparse_s)
            self._pipeline.sparse_s = 0.0
        use = stage.precision.get("use", "fp32")
        return {**self._meter.taken(), "peak": matmul_rate(self.device, use)}

    def _dense_gradients(self) -> list[Tensor]:
        return gradients_of(self.dense)

    def _draw_dropout(self, stage: StageSetup, step: int, chunk: int = 0) -> None:
        """Seed the device's generator for a chunk of a step on this rank."""
        words = (stage.name, step, self.rank, "dropout", *([chunk] if chunk else []))
        device(self.device).seed(key(self.run.seed, *words) >> 1)

    def _table_lr(self, stage: StageSetup, step: int, table: str) -> float:
        """A table's rate follows the dense one."""
        return self.run.tables[table]["lr"] * LearningRate(**stage.lr).at(step, stage.steps) / stage.base

    @cached_property
    def _voters(self) -> Voters | None:
        return self.run.voters(self.corpus)

    def _read_items(self) -> None:
        """The rows that the nearest items vote by, as they are now; every rank asks at once."""
        self._near = True
        if self._voters is not None and self._voters.nearest:
            keys = torch.from_numpy(self.corpus.seq.keys_of_items(self._voters.items))
            rows = self.sparse.pull(self.run.features["item"], keys, train=False)
            self._voters.read(rows.detach().clone())

    def _samples(self, stage: StageSetup) -> Samples:
        """The source of the samples, opened for the stage under way."""
        if self._opened is None or self._opened[0] != stage:
            request = self._request(stage)
            opened = RlTargets(request) if stage.rl_targets else open_source(self.run.source, request)
            self._opened = stage, opened
        return self._opened[1]

    def _prompts_of(self, stage: StageSetup) -> RlPrompts:
        """The prompts of an RL stage."""
        if self._prompts is None or self._prompts[0] != stage:
            self._prompts = stage, RlPrompts(self.corpus.seq, self.run.seed, stage.name, stage.users)
        return self._prompts[1]

    def _ledger(self, stage: StageSetup | None = None) -> Ledger | None:
        """The account of the stage under way; None where its source keeps none."""
        if self._prompts is not None:
            return self._prompts[1].ledger
        samples = self._samples(stage) if stage is not None else self._opened and self._opened[1]
        return samples.ledger if isinstance(samples, Counted) else None

    def _request(self, stage: StageSetup) -> SampleRequest:
        """What the stage wants of the source."""
        corpus = self.corpus
        return self._request_of(stage, "users", lambda: corpus.seq, lambda: corpus.items, corpus.sids)

    def _request_of(self, stage: StageSetup, unit: str, *data: Any) -> SampleRequest:
        run = self.run
        features, size = tuple(run.features), (stage.users, run.history)
        joins = self.corpus.joins if unit == "users" else None
        return SampleRequest(
            stage.name, run.seed, unit, *size, stage.target, stage.chunk, features, *data, joins=joins
        )


def _write(
    kind: str, tensors: Mapping[str, Tensor], folder: Path, name: str = "model.safetensors"
) -> list[Path]:
    path = folder / kind / name
    write_tensors(path, tensors)
    return [path]
