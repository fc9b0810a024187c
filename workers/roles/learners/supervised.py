"""SupervisedLearner: trains a stage from batches on one rank.

A step reads this rank's samples, which are a pure function of the step number. It computes gradients in chunks of bounded
size, updates the dense weights and sends the gradients of the sparse rows to their shards. Losses are divided by the number
of targets on all ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.embedding.training import PrefetchPipeline
from nonet.random import hash_words
from nonet.samples.ledger import SampleLedger, has_ledger, write_notes, write_snapshot
from nonet.samples.sources import (
    CountedSource,
    RlTargets,
    SampleRequest,
    Samples,
    has_states,
    open_source,
    read_state,
    write_state,
)
from nonet.workers import SaveOptions, StepShare
from nonet.workers.devices import get_device
from nonet.workers.engines import (
    StepPrecision,
    are_all_finite,
    compute_clip_factor,
    compute_sparse_norm,
    list_gradients,
    measure_matmul_rate,
    poison,
    skip_step,
    write_precision,
)
from nonet.workers.roles import CheckpointPart, LearnerContext, StageLearner, StageSetup
from nonet.workers.roles.learners.supervised_loss import SupervisedLoss

# Batches in flight if rows are exchanged between processes: with three, `bench embedding` overlaps 80 % of the
# shorter of communication and computation.
IN_FLIGHT = 3
_STEPS_PER_RELEASE = 64  # Number of steps between two releases of memory-mapped pages.

# Shapes: M unique keys, D width.


class SupervisedLearner(StageLearner):
    """The learner of supervised stages: trains on batches of histories."""

    def __init__(self, context: LearnerContext, stage: StageSetup):
        super().__init__(context, stage)
        self.precision = StepPrecision(stage.precision)
        self._opened_samples: Samples | None = None
        self._skipped = 0  # Successive steps that were skipped because a loss or gradient was not finite.
        self._last_record_at = 0.0
        self._pipeline: PrefetchPipeline | None = None

    def train(self, start: int, stop: int) -> list[dict[str, float]]:
        """Take the steps [start, stop) of the stage.

        Returns:
            One record per step: loss (nats per target), events, lr, norm, seconds, and the part of the seconds that the step
                waited for its samples (`waited`).
        """
        context, stage = self.context, self.stage
        # The rate is measured and cached before the step timer starts, so that the first step does not include it.
        measure_matmul_rate(context.device, stage.precision.use)
        self._last_record_at = time.perf_counter()
        context.meter.take_counts()  # Drop counts of earlier work.
        waits_for_rows = context.sparse.layout.world > 1 or context.run.joins
        self._pipeline = pipeline = PrefetchPipeline(
            context.sparse,
            self.read_batch,
            self._get_pulled_keys,
            self._take_shared_step,
            depth=context.run.in_flight or (IN_FLIGHT if waits_for_rows else 1),
            step=lambda step: stage.first + step + 1,  # Rows count the steps of the whole run from 1.
            lr=self._compute_table_rate,
            timeout_s=context.run.deadlines.step.scale_by(2),
            learns=not stage.frozen_rows,
        )
        records = pipeline.run(start, stop)
        context.sparse.stop()
        if start // _STEPS_PER_RELEASE != stop // _STEPS_PER_RELEASE:
            context.corpus.release_pages()
        return records

    def read_batch(self, step: int) -> Any:
        """Read this rank's samples of a step.

        Returns:
            A `StepShare`, or the batch type of a subclass; its `keys` are the sparse keys by table.
        """
        samples = self.samples.batch(step, self.context.rank, self.context.world)
        return StepShare(
            samples, self.context.run.features, self.context.device, self.loss.draw_negatives(step)
        )

    def _get_pulled_keys(self, batch: Any) -> Mapping[str, Tensor]:
        """Return the keys that this rank pulls, by table: those of a batch, or none if its tensor group's leader pulls them."""
        if self.context.member.leads_tensor_group:
            return batch.keys
        return {table: keys[:0] for table, keys in batch.keys.items()}

    def _take_shared_step(
        self, step: int, batch: Any, rows: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor] | None, dict[str, float]]:
        """Take one dense step with the rows that the leader of the tensor group has pulled. Only the leader returns gradients."""
        member = self.context.member
        if member.tensor == 1:
            return self.take_step(step, batch, rows)
        rows = member.share_in_tensor_group(
            {table: (len(batch.keys[table]), own.shape[1]) for table, own in rows.items()}, rows
        )
        grads, record = self.take_step(step, batch, rows)
        if grads is not None and not member.leads_tensor_group:
            grads = {table: grad[:0] for table, grad in grads.items()}
        return grads, record

    def take_step(
        self, step: int, batch: Any, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        """Take one dense step.

        Args:
            step: Number of the step in the stage.
            batch: What `read_batch` returned.
            rows: Sparse rows [M, D] of the batch's keys, by table.

        Returns:
            The gradients of the rows (None if the step was skipped or the stage freezes rows), and the step's record.
        """
        self.context.model.train()
        with self.context.meter.time_section("dense"):
            grads, sums = self.loss.compute_gradients(
                batch, rows, lambda chunk: self.seed_dropout(step, chunk)
            )
            sums |= self.add_gradients(step)
        grads, record = self.finish_step(step, sums["loss"], sums["events"], batch.keys, grads)
        return None if self.stage.frozen_rows else grads, sums | record

    def add_gradients(self, step: int) -> dict[str, float]:
        """Add the gradients of a further loss, which a subclass defines, and return its values for the step's record."""
        return {}

    def finish_step(
        self, step: int, loss: float, events: float, keys: Mapping[str, Tensor], grads: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, float]]:
        """Update the dense weights, unless a gradient is not finite or fp16 overflowed.

        Args:
            step: Number of the step in the stage.
            loss: Mean loss per target over all ranks.
            events: Number of targets over all ranks.
            keys: Sparse keys [M] by table.
            grads: Gradients of their rows [M, D] by table.

        Returns:
            The gradients of the rows (None if the step was skipped), and the step's record, whose `seconds` are the time since
            the previous record.
        """
        lr = self.stage.lr.compute_rate(step, self.stage.steps)
        context, precision = self.context, self.precision
        scale_record: dict[str, float] = {}
        if not are_all_finite([torch.tensor(loss), *grads.values()]):
            # Non-finite dense gradients make all ranks skip the step after the all-reduce.
            poison(list_gradients(context.dense))
        # Both calls must run, since each unscales its gradients.
        finite = precision.unscale_gradients(list_gradients(context.dense)) & precision.unscale_gradients(
            grads.values()
        )
        is_applied = not precision.scales or context.member.sum_over_ranks(float(not finite))[0] == 0.0
        if precision.scales:
            scale_record = {"scale": precision.scale, "skipped": float(not is_applied)}
        precision.update_loss_scale(is_applied)
        # After an overflow of fp16 the step may succeed with a smaller scale, so it does not count as a bad step.
        overflows = not is_applied and math.isfinite(loss) and precision.scale > 1
        norm = self._clip(keys, grads) if is_applied else math.inf
        is_applied = math.isfinite(norm)
        if is_applied:
            with context.meter.time_section("optimizer"):
                context.dense.step(lr)
        else:
            skip_step(context.dense)
            scale_record |= {"skipped": 1.0}
        self._skipped = 0 if is_applied or overflows else self._skipped + 1
        if self._skipped:
            scale_record["skipped_in_a_row"] = float(self._skipped)
        if self._ledger is not None:
            self._ledger.apply_step(step)
        previous_at, self._last_record_at = self._last_record_at, time.perf_counter()
        record = {
            "loss": loss,
            "events": events,
            "lr": lr,
            "norm": norm if is_applied else 0.0,
            **scale_record,
            "seconds": self._last_record_at - previous_at,
            "waited": self._pipeline.waited_s if self._pipeline else 0.0,
            **self._take_measurements(),
        }
        return grads if is_applied else None, record

    def seed_dropout(self, step: int, chunk: int = 0) -> None:
        """Seed the device's generator for a chunk of a step on this rank."""
        words = (self.stage.name, step, self.context.rank, "dropout", *([chunk] if chunk else []))
        seed = hash_words(self.context.run.seed, *words) >> 1  # 63 bits fit into every generator.
        get_device(self.context.device).seed(seed)

    @cached_property
    def loss(self) -> SupervisedLoss:
        """The losses of the stage's batches."""
        adds_gradients = type(self).add_gradients is not SupervisedLearner.add_gradients
        return SupervisedLoss(self.context, self.stage, self.precision, ends_step=not adds_gradients)

    @property
    def samples(self) -> Samples:
        """The source of the stage's samples, opened at first use."""
        if self._opened_samples is None:
            request = self.make_request()
            self._opened_samples = (
                RlTargets(request) if self.stage.rl_targets else open_source(self.context.run.source, request)
            )
        return self._opened_samples

    def make_request(self) -> SampleRequest:
        """Return the request that opens the source of the stage's samples, with one sample per user."""
        corpus = self.context.corpus
        data = (lambda: corpus.seq, lambda: corpus.items, corpus.sids)
        return self._build_request("users", *data, joins=corpus.joins)

    def restore(self, folder: Path) -> None:
        """Restore mixed-precision state, the position of the source and the ledger from a checkpoint."""
        self.precision.load(folder)
        if has_states(str(folder)):
            self.samples.restore(read_state(str(folder), self.context.rank, self.context.world))
        if has_ledger(folder) and isinstance(self.samples, CountedSource) and self.samples.ledger is not None:
            self.samples.ledger.load(folder, self.context.rank)

    def list_checkpoint_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return functions that write mixed-precision state, the position of the source and the ledger."""
        parts: list[CheckpointPart] = []
        rank, world = self.context.rank, self.context.world
        if rank == 0 and (state := self.precision.get_state()):
            parts.append(partial(write_precision, state))
        if (ledger := self._ledger) is not None:
            write_rank_notes = partial(write_notes, ledger.dump_notes(), rank)
            parts.append(write_rank_notes if rank else partial(write_snapshot, ledger.snapshot()))
        if self._opened_samples is not None and (state := self._opened_samples.state()):
            parts.append(partial(write_state, json.dumps(dict(state)), rank, world))
        return parts

    @property
    def _ledger(self) -> SampleLedger | None:
        """The ledger of the samples; None before the first batch, or if the source keeps none."""
        return self._opened_samples.ledger if isinstance(self._opened_samples, CountedSource) else None

    def _build_request(self, unit: str, *data: Any, joins: Any = None) -> SampleRequest:
        """Return a sample request.

        Args:
            unit: Unit of a sample, "users" or "events".
            *data: Arguments of `SampleRequest` after `features`.
            joins: Stores whose columns are joined to the samples.
        """
        run, stage = self.context.run, self.stage
        size, features = (stage.users, run.history), tuple(run.features)
        return SampleRequest(
            stage.name,
            run.seed,
            unit,
            *size,
            stage.target,
            stage.chunk,
            features,
            *data,
            joins=joins,
            tasks=stage.tasks,
        )

    def _clip(self, keys: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> float:
        """Clip the dense gradients, and those of rows if the optimizer has `clip_rows`.

        Returns:
            The norm before clipping; inf or NaN if a gradient is not finite.
        """
        dense, learning = self.context.dense, self.context.dense.learning
        with self.context.meter.time_section("communication"):
            if not learning.clip_rows:
                return dense.clip()
            member = self.context.member
            n_counted = None if member.leads_tensor_group else 0  # Rows of a tensor group count once.
            own_keys, own_grads = (
                {table: tensor[:n_counted] for table, tensor in tensors.items()} for tensors in (keys, grads)
            )
            norm = dense.clip(compute_sparse_norm(own_keys, own_grads, member))
            torch._foreach_mul_(list(grads.values()), compute_clip_factor(norm, learning.clip))
            return norm

    def _take_measurements(self) -> dict[str, float]:
        """Return the measurements of the step meter since the last record, with the time of sparse work, and reset them."""
        if self._pipeline is not None:
            self.context.meter.add_seconds("sparse", self._pipeline.sparse_s)
            self._pipeline.sparse_s = 0.0
        return self.context.measure(self.stage)

    def _compute_table_rate(self, step: int, table: str) -> float:
        """Return the learning rate of a table at a step: the table's own rate, scaled by the schedule of the dense rate."""
        dense_rate = self.stage.lr.compute_rate(step, self.stage.steps)
        return self.context.run.tables[table]["lr"] * dense_rate / self.stage.base
