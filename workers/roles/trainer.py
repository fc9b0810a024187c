"""Trainer: the role that learns; supervised steps from the sequences, RL steps from beams and scores.

A step is lease (a pure function of the step number), gradients, dense step, sparse apply. Every rank works on its share
of the step's rows, a bounded chunk at a time; losses are divided by the global count of targets. The sparse rows are frozen
during RL: the KL then measures the dense policy alone, against a reference that reads the same rows.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.background import Writing, Written, sealed
from nonet.embedding.exchange import Layout
from nonet.embedding.training import Pipeline, SparseWorld, reshard
from nonet.models import build_model
from nonet.models.generation import Corpus, log_prob, on
from nonet.models.sid_decoder import sid_loss
from nonet.plugins import heavy
from nonet.random import key
from nonet.rl import Advantages, PolicyLoss
from nonet.rl.algorithms import ALGORITHMS, Algorithm, Policy
from nonet.samples.batches import (
    bounded,
    prompt_batch,
    step_rows,
    taught_windows,
    window_batch,
    window_positions,
)
from nonet.types import SampleBatch
from nonet.workers.devices import claim, device, tensors_of
from nonet.workers.roles.dense_optimizer import Dense, LearningRate, load_model
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.settings import RunSetup, StageSetup
from nonet.workers.roles.sparse_batch import Asked, Share
from nonet.workers.roles.tensor_files import host_copy, tensor_bytes, write_tensors
from nonet.workers.runtime import (
    DistributeWorker,
    Gang,
    Membership,
    PerRank,
    Replicate,
    Shard,
    cut,
    join_process_group,
    leave,
    method,
    open_store,
)

# Batches in flight where rows travel: `bench embedding` hides 80 % of the shorter side with three.
IN_FLIGHT = 3

# Shapes: U prompts, W beams, L levels, N events, M unique keys, D width.


class Trainer(DistributeWorker):
    """One rank of the trainer group."""

    def __init__(self, run: RunSetup):
        self.run = run
        self._member = Membership(0, 1)
        self._store: Any = None
        self._sparse: SparseWorld | None = None
        self._reference: torch.nn.Module | None = None
        self._began = 0.0

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, int]:
        """Open the artifacts and build the model; its parameters and the users there are."""
        self.corpus = Corpus.load(folders)
        model = build_model(self.run.model, self.corpus.codes, self.run.feature_dims(), self.run.seed)
        self.model = model.to(claim(self.device))
        self.dense = Dense(self.model, self._member)
        return {"parameters": sum(p.numel() for p in self.model.parameters()), "users": len(self.corpus.seq)}

    @method(ttl_steps=Replicate)
    def settle(self, ttl_steps: Mapping[str, int]) -> None:
        """Times to live by table, known once the data is; before a gang is joined."""
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

    @method(gang=PerRank)
    def meet(self, gang: Gang) -> None:
        """Join the gang; fused shards of this process take the same place."""
        kind = device(self.device)
        if gang.trainers > 1:  # gradients meet on the device
            kind.check_collectives()
        self._member = join_process_group(
            gang, self.rank, trainers_backend=kind.collectives() if gang.trainers > 1 else "gloo"
        )
        if hasattr(self, "dense"):
            self.dense.member = self._member
        if gang.shards:
            self._sparse = SparseWorld(
                self._specs(),
                seed=self.run.seed,
                layout=Layout.apart(self.rank, gang.trainers, gang.shards),
                group=self._member.everyone,
                wire=self.run.wire,
                local=True,
            )
        else:
            self._shard.enter(Layout.fused(self.rank, gang.trainers), self._member)

    @method(stage=Replicate)
    def begin(self, stage: StageSetup) -> None:
        """Start a stage: a fresh optimizer; for RL also the frozen reference."""
        self.dense.restart()
        self._reference = self._frozen() if _needs_reference(stage) else None

    @method(collect="first", stage=Replicate)
    def train(self, stage: StageSetup, start: int, stop: int) -> list[dict[str, float]]:
        """Supervised steps [start, stop) of a stage; a record a step: loss (nats a target), events, lr, norm, seconds."""
        self._began = time.perf_counter()
        pipeline = Pipeline(
            self.sparse,
            lambda step: self._read(stage, step),
            lambda read: read.keys,
            lambda step, read, rows: self._computed(stage, step, read, rows),
            depth=self.run.in_flight or (IN_FLIGHT if self.sparse.layout.world > 1 else 1),
            step=lambda step: stage.first + step + 1,
            lr=lambda step, table: self._table_lr(stage, step, table),
            timeout_s=self.run.deadlines.step.times(2),
        )
        records = pipeline.run(start, stop)
        self.sparse.stop()
        return records

    @method(collect="first", stage=Replicate, beams=Shard, scores=Shard)
    def update(
        self, stage: StageSetup, step: int, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """One RL step on this rank's share of the prompts: beams (Rollouts on the wire) and scores [U, W] by reward."""
        began = time.perf_counter()
        self.model.eval()
        advantage, valid_UW = self._advantages(stage, beams, scores)
        count = max(self.dense.total(float(valid_UW.sum() * beams["sid"].shape[-1]))[0], 1.0)
        parts = bounded(np.ones(len(valid_UW), np.int64), stage.chunk)
        share = Share(
            [self._prompts(stage, cut(beams, p.start, p.stop)) for p in parts],
            self.run.features,
            self.device,
        )
        found = {
            table: self.sparse.pull(table, keys, train=False).to(self.device)
            for table, keys in share.keys.items()
        }
        sums = [0.0] * 4
        for part, chunk in zip(parts, share, strict=True):
            policy = self._policy_loss(
                stage, chunk, found, cut(beams, part.start, part.stop), advantage.value[part]
            )
            (policy.loss / count).backward()
            each = policy.loss.detach(), policy.kl, policy.clipped, policy.ratio
            sums = [total + float(value) for total, value in zip(sums, each, strict=True)]
        flat = advantage.small_groups + advantage.flat_groups
        totals = [count, *self.dense.total(*sums, float(flat), float(len(valid_UW)))]
        lr = LearningRate(**stage.lr).at(step, stage.steps)
        norm = self.dense.step(lr)
        self.sparse.stop()
        loss, kl, clipped, ratio = (total / count for total in totals[1:5])
        record = {
            "loss": loss,
            "kl": kl,
            "clipped": clipped,
            "ratio": ratio,
            "flat_groups": totals[5],
            "prompts": totals[6],
        }
        return record | {"lr": lr, "norm": norm, "seconds": time.perf_counter() - began}

    @method(collect="first", shards=Replicate)
    def reshard(self, shards: Sequence[int]) -> int:
        """Move rows, between steps, until these shards hold all of them evenly; the version of the slice map after it."""
        for _ in reshard(self.sparse, shards):
            pass
        self.sparse.stop()
        return self.sparse.slices.version

    @method(collect="first")
    def weights(self) -> bytes:
        """The dense weights as safetensors bytes, from rank 0."""
        return tensor_bytes(self.model.state_dict()) if self.rank == 0 else b""

    @method()
    def save(self, folder: str, wait: bool = True) -> Written | None:
        """Write folder/dense/ from rank 0, and in RL folder/reference/, as they are at this call; the answer of `saved`.

        Tensors are copied to the host, then written on a thread beside later steps where nobody waits.
        """
        top, parts = Path(folder), self._parts() if self.rank == 0 else []
        self._saving = Writing(
            top, "dense weights", lambda: sealed(top, [path for write in parts for path in write(top)])
        )
        return self.saved(wait)

    @method(away=True)
    def saved(self, wait: bool = False) -> Written | None:
        """What the last save wrote; None while it is being written and nobody waits. Raises what stopped it."""
        return self._saving.answer(wait, self.run.deadlines.save)

    def _parts(self) -> list[Callable[[Path], list[Path]]]:
        """What rank 0 adds to a commit, copied: each is called with the commit's folder and says what it wrote."""
        dense = self.dense.copied()
        parts: list[Callable[[Path], list[Path]]] = [lambda folder: dense(folder / "dense")]
        if self._reference is not None:
            parts.append(partial(_write_reference, host_copy(self._reference.state_dict())))
        return parts

    @method(stage=Replicate)
    def load(self, folder: str, stage: StageSetup | None = None) -> None:
        """Read a commit; `stage` when that stage goes on from it (optimizer and reference too)."""
        self.dense.load(Path(folder) / "dense", optimizer=stage is not None)
        if stage is not None and _needs_reference(stage):
            self._reference = self._frozen()
            load_model(self._reference, Path(folder) / "reference")

    def held(self) -> Iterable[Tensor]:
        """Model, gradients, optimizer and reference; the sparse rows live in host memory."""
        if not hasattr(self, "dense"):
            return ()
        mine = tensors_of(self.model, self.dense.optimizer)
        return mine + (tensors_of(self._reference) if self._reference is not None else [])

    def teardown(self) -> None:
        leave(self._member)

    @property
    def sparse(self) -> SparseWorld:
        """This rank's part of the sparse world: a fused shard's, or its own as a trainer apart."""
        return self._sparse or self._shard.sparse

    @property
    def _shard(self) -> EmbeddingShard:
        return self.place.peers["embedding"]

    def _specs(self) -> dict[str, Any]:
        return self.run.specs()

    def _advantages(
        self, stage: StageSetup, beams: Mapping[str, Any], scores: Mapping[str, np.ndarray]
    ) -> tuple[Advantages, Tensor]:
        """Advantages of this rank's whole share, and which of its beams are valid [U, W]."""
        valid_UW = torch.from_numpy(np.ascontiguousarray(beams["valid"]))
        rewards = {name: torch.from_numpy(np.ascontiguousarray(score)) for name, score in scores.items()}
        compute = heavy(_algorithm(stage).advantage)  # small, in float64: on the host, whatever the device
        return compute(rewards, stage.weights, valid_UW, stage.algorithm, self._sum), valid_UW

    def _prompts(self, stage: StageSetup, beams: Mapping[str, Any]) -> Callable[[], SampleBatch]:
        """How the prompts that these beams answer are made a batch."""
        return partial(
            prompt_batch,
            self.corpus.seq,
            self.corpus.sids,
            beams["user"],
            beams["position"],
            history=self.run.history,
            stage=stage.name,
        )

    def _policy_loss(
        self,
        stage: StageSetup,
        chunk: Asked,
        found: Mapping[str, Tensor],
        beams: Mapping[str, Any],
        advantage_UW: Tensor,
    ) -> PolicyLoss:
        """The algorithm's loss of a chunk's beams with their advantages; `found` are the rows of its tables."""
        sid_UWL, valid_UW, old_UWL = (
            torch.from_numpy(np.ascontiguousarray(beams[name])).to(self.device)
            for name in ("sid", "valid", "logp")
        )
        batch, rows, reference_UWL = on(chunk.batch, self.device), chunk.spread(found), None
        if self._reference is not None:
            with torch.no_grad():
                reference_UWL = log_prob(self._reference, batch, rows, sid_UWL, self.corpus.trie)
        logp_UWL = log_prob(self.model, batch, rows, sid_UWL, self.corpus.trie)
        policy = Policy(logp_UWL, old_UWL, advantage_UW.to(self.device), valid_UW, reference_UWL)
        return heavy(_algorithm(stage).loss)(policy, stage.algorithm)

    def _frozen(self) -> torch.nn.Module:
        """The weights as they are, to be compared with."""
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def _sum(self, moments: Tensor) -> Tensor:
        return torch.tensor(self.dense.total(*moments.tolist()), dtype=moments.dtype)

    def _read(self, stage: StageSetup, step: int) -> Any:
        """This rank's part of a step, with the keys it asks for."""
        return Share(self._lease(stage, step), self.run.features, self.device)

    def _computed(
        self, stage: StageSetup, step: int, read: Any, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """One dense step on rows [M, D] by table; their gradients, and the step's record."""
        self.model.train()
        leaves = {table: found.detach().to(self.device).requires_grad_() for table, found in rows.items()}
        total, mine = self.dense.total(float(read.targets))[0], 0.0
        for number, chunk in enumerate(read):
            self._draw_dropout(stage, step, number)
            if not bool(chunk.batch.loss_mask.values.any()):
                continue  # a rank's share may hold no target; it still meets the others
            batch = on(chunk.batch, self.device)
            loss, _ = sid_loss(self.model, batch, chunk.spread(leaves), self.corpus.trie, ahead=stage.ahead)
            (loss / max(total, 1.0)).backward()
            mine += float(loss.detach())
        loss_sum = self.dense.total(mine)[0]
        grads = {
            table: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(rows[table].device)
            for table, leaf in leaves.items()
        }
        return grads, self._stepped(stage, step, loss_sum / max(total, 1.0), total)

    def _stepped(self, stage: StageSetup, step: int, loss: float, events: float) -> dict[str, float]:
        """Take the dense step; the step's record. Its seconds are since the record before."""
        lr = LearningRate(**stage.lr).at(step, stage.steps)
        norm = self.dense.step(lr)
        before, self._began = self._began, time.perf_counter()
        return {"loss": loss, "events": events, "lr": lr, "norm": norm, "seconds": self._began - before}

    def _draw_dropout(self, stage: StageSetup, step: int, chunk: int = 0) -> None:
        """Seed the device's generator for a chunk of a step on this rank."""
        words = (stage.name, step, self.rank, "dropout", *([chunk] if chunk else []))
        device(self.device).seed(key(self.run.seed, *words) >> 1)

    def _table_lr(self, stage: StageSetup, step: int, table: str) -> float:
        """A table's rate follows the dense one."""
        return self.run.tables[table]["lr"] * LearningRate(**stage.lr).at(step, stage.steps) / stage.base

    def _lease(self, stage: StageSetup, step: int) -> list[Callable[[], SampleBatch]]:
        """This rank's share of the step's users, as windows of their training events: how each chunk of them is made."""
        seq, target = self.corpus.seq, self.corpus.seq.targets[stage.target] if stage.target else None
        epoch, rows = step_rows(len(seq), stage.users, self.run.seed, stage.name, step)
        found = taught_windows(
            seq,
            rows[self.rank :: self.world],
            history=self.run.history,
            stage=stage.name,
            epoch=epoch,
            seed=self.run.seed,
            target=target,
        )
        make = partial(window_batch, seq, self.corpus.sids, stage=stage.name, epoch=epoch, target=target)
        parts = bounded(window_positions(seq, found), stage.chunk)
        return [partial(make, (found[0][part], found[1][part], found[2][part])) for part in parts]


def _algorithm(stage: StageSetup) -> Algorithm:
    return ALGORITHMS.get(stage.algorithm["use"])


def _write_reference(tensors: Mapping[str, Tensor], folder: Path) -> list[Path]:
    path = folder / "reference" / "model.safetensors"
    write_tensors(path, tensors)
    return [path]


def _needs_reference(stage: StageSetup) -> bool:
    return bool(stage.algorithm) and _algorithm(stage).needs_reference(stage.algorithm)
