"""An opened stream: the order of its rows, and batches from any place in the order, with either engine.

    feed = stream.open(rows=4096, step_rows=65536)
    ledger = feed.make_ledger()
    for batch in feed.iterate_batches(feed.get_slices(step, rank, world), ledger):
        ...
        ledger.apply_step(step)

The content of a slice depends on the slice alone, so both engines and any number of ranks give the same rows in the same
order.
"""

# Shapes: B rows of a slice.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from nonet.errors import ConfigError
from nonet.samples.ledger import DataManifest, OrderSlice, SampleLedger, StepRange
from nonet.samples.streams.batch import StreamBatch, to_tensors
from nonet.samples.streams.leaf import StreamLeaf
from nonet.samples.streams.local_engine import read_locally
from nonet.samples.streams.operators import describe_operators, list_row_changes
from nonet.samples.streams.plan import StreamPlan
from nonet.samples.streams.slices import RawSlice, SliceReader
from nonet.suggest import join_names

RAY_BYTES = 64 << 30
"""Files of more bytes in total are read through Ray Data, if the engine is not given."""
ENGINES = ("local", "ray")


class StreamFeed(SliceReader):
    """An opened stream, made by `Stream.open`; see the module.

    Args:
        stream: The stream.
        slice_rows: Number of rows of a slice.
        step_rows: Number of rows of a global step.
        engine: "local" or "ray"; None to choose by the size of the files.
        manifest: The files as an earlier opening found them; None to inspect them.
        name: Name, such as that of a stage, that the random order depends on in addition to the seed.
    """

    def __init__(
        self,
        stream: StreamPlan,
        slice_rows: int,
        step_rows: int,
        engine: str | None,
        manifest: DataManifest | None,
        name: str = "",
    ):
        super().__init__(stream, slice_rows, step_rows, manifest, name)
        self.engine = self._choose_engine(engine)

    @cached_property
    def order(self) -> str:
        """A hash of everything, except the files, that determines which rows each global step reads."""
        facts = (
            (
                [leaf.order.digest for leaf in self.leaves],
                [share for _, share in self.stream.mixed],
                self.rows,
            ),
            self.steps.step_rows,
            [(leaf.files.where, list_row_changes(leaf.stream.operators)) for leaf in self.leaves],
            list_row_changes(self.stream.operators),
        )
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def make_ledger(self) -> SampleLedger:
        """Create a new ledger for the rows of this feed."""
        return SampleLedger(self.manifest, self.order, self.rows)

    def get_slices(self, step: int, rank: int = 0, world: int = 1) -> list[OrderSlice]:
        """Return the slices of a global step that rank `rank` of `world` reads."""
        return self.steps.cut_slices(step)[rank::world]

    def iterate_steps(self, first_step: int, rank: int = 0, world: int = 1) -> StepRange:
        """Return the slices that rank `rank` of `world` reads from a step on, epoch after epoch without end."""
        return StepRange(self.steps, first_step, None, rank, world)  # None: there is no last step.

    def iterate_epoch(
        self, epoch: int, *, rank: int = 0, world: int = 1, first_step: int = 0
    ) -> Iterator[StreamBatch]:
        """Iterate over a rank's batches of one epoch from a given step on; empty batches are skipped.

        Args:
            epoch: The epoch.
            rank: Index of the rank.
            world: Number of ranks.
            first_step: First step within the epoch.
        """
        steps_per_epoch = self.steps.steps_per_epoch
        start, stop = epoch * steps_per_epoch + first_step, (epoch + 1) * steps_per_epoch
        slices = StepRange(self.steps, start, stop, rank, world)
        for batch in self.iterate_batches(slices, shared=world > 1):
            if len(batch):
                yield batch

    def iterate_batches(
        self, slices: Iterable[OrderSlice], ledger: SampleLedger | None = None, *, shared: bool = False
    ) -> Iterator[StreamBatch]:
        """Yield the batches of slices in order, at least one per slice; a batch may have no rows.

        Each slice is leased in the ledger when it is yielded; `apply_batch` or `SampleLedger.apply_step` marks it as done.

        Args:
            slices: The slices to read.
            ledger: The ledger of rows; None to record nothing.
            shared: Whether other processes of this machine read the same row groups, so that each group is decoded once.
        """
        if self.engine == "ray":
            from nonet.samples.streams.ray_engine import read_on_ray

            raw_slices: Iterator[RawSlice] = read_on_ray(self, slices)
        else:
            raw_slices = read_locally(self, slices, shared)
        for raw in raw_slices:
            if ledger is not None:
                ledger.lease(raw.slice)
            yield from self.cut_batches(raw)

    def apply_batch(self, batch: StreamBatch, ledger: SampleLedger) -> None:
        """Record that the optimizer step that used a batch is complete: the last batch of a slice marks the slice as done."""
        if batch.last:
            ledger.apply(batch.slice, filtered=batch.filtered, skipped=batch.skipped)

    def cut_batches(self, raw: RawSlice) -> list[StreamBatch]:
        """Cut a slice into batches; more than one only if the stream packs."""
        # At least 0, because a `map` operator may add rows.
        filtered = max(0, raw.read - len(raw.skipped) - len(raw.rows))
        if self.stream.tokens is None:
            tensors = to_tensors(raw.rows)
            return [StreamBatch(tensors, raw.slice, raw.ranges, filtered=filtered, skipped=raw.skipped)]
        from nonet.samples.batches import split_by_size

        column, max_tokens = self.stream.tokens
        list_column = raw.rows.column(column)
        list_lengths = np.diff(list_column.offsets.to_numpy())
        parts = split_by_size(list_lengths, max_tokens)  # Ranges of rows.
        tensors_of_parts = (to_tensors(raw.rows.slice(part.start, part.stop - part.start)) for part in parts)
        return [
            StreamBatch(tensors, raw.slice, raw.ranges, number, len(parts), filtered, raw.skipped)
            for number, tensors in enumerate(tensors_of_parts)
        ]

    def explain(self) -> str:
        """Return a description of the plan, in lines: files, columns, order, operators and engine."""
        lines = [line for leaf in self.leaves for line in _explain_leaf(leaf)]
        if self.stream.mixed:
            shares = [f"{share:.3g} of stream {i}" for i, (_, share) in enumerate(self.stream.mixed)]
            lines.append("mix: " + ", ".join(shares))
            lines += [
                f"  {line}" for leaf in self.leaves for line in describe_operators(leaf.stream.operators)
            ]
        lines += describe_operators(self.stream.operators)
        lines += [f"take the first {self.stream.most:,} rows of each epoch"] if self.stream.most else []
        lines += (
            [f"pack {self.stream.tokens[1]:,} of {self.stream.tokens[0]} a batch"]
            if self.stream.tokens
            else []
        )
        lines.append(
            f"an epoch: {self.rows:,} rows in {self.steps.steps_per_epoch:,} steps of {self.steps.step_rows:,}, "
            f"read in slices of {self.steps.slice_rows:,}"
        )
        engine_place = "threads of the trainer" if self.engine == "local" else "Ray Data"
        lines.append(f"engine {self.engine}: {engine_place}, {self.stream.ahead} slices ahead")
        lines.append(f"manifest {self.manifest.digest}")
        return "\n".join(lines)

    def _choose_engine(self, given_engine: str | None) -> str:
        """Return the given engine, or choose one by the size of the files. Raises ConfigError for an unknown one."""
        if given_engine is not None and given_engine not in ENGINES:
            raise ConfigError(f"data.engine: {given_engine!r}; there are local and ray")
        return given_engine or ("ray" if sum(leaf.bytes for leaf in self.leaves) > RAY_BYTES else "local")


def _explain_leaf(leaf: StreamLeaf) -> list[str]:
    """Return lines that describe the files of one leaf, their columns and their order."""
    files, read_groups = leaf.manifest.files, len(leaf.groups)
    all_groups = len(leaf.manifest.group_rows)
    lines = [
        f"read {leaf.file_format}: {len(files)} files, {_format_bytes(leaf.bytes)}, {leaf.manifest.rows:,} rows in "
        f"{all_groups} groups"
    ]
    read_names = leaf.files.columns or leaf.schema.names
    lines.append("  columns: " + ", ".join(f"{name} {leaf.schema.field(name).type}" for name in read_names))
    unread_names = [name for name in leaf.schema.names if name not in read_names]
    lines += [f"  not read: {join_names(unread_names)}"] if unread_names else []
    if leaf.files.where:
        pruned_groups = all_groups - read_groups
        pruning = (
            f"; statistics rule out {pruned_groups} groups ({leaf.pruned_rows:,} rows)"
            if pruned_groups
            else ""
        )
        lines.append(f"  where {leaf.files.where}{pruning}")
    lines += ["  rows that are no good are skipped and counted"] if leaf.files.on_bad_rows == "skip" else []
    order = "the files' own" if leaf.order.seed is None else f"row groups shuffled by seed {leaf.order.seed}"
    inside_groups = ", and rows inside each" if leaf.order.seed is not None and leaf.order.in_group else ""
    return [*lines, f"  order: {order}{inside_groups}"]


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
