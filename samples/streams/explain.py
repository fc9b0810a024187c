"""Describes what a stream will do, in lines: files, columns, order, engine, operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.samples.streams.operators import describe_operators
from nonet.suggest import join_names

if TYPE_CHECKING:
    from nonet.samples.streams.feed import StreamFeed
    from nonet.samples.streams.leaf import StreamLeaf
    from nonet.samples.streams.stream import Stream


def explain_stream(stream: Stream, engine: str | None) -> str:
    """Describe a stream. Opens the footers of its files and reads no rows."""
    feed: StreamFeed = stream.open(engine=engine)
    lines = [line for leaf in feed.leaves for line in _explain_leaf(leaf)]
    if stream.mixed:
        lines.append(
            "mix: " + ", ".join(f"{share:.3g} of stream {at}" for at, (_, share) in enumerate(stream.mixed))
        )
        lines += [f"  {line}" for leaf in feed.leaves for line in describe_operators(leaf.stream.operators)]
    lines += describe_operators(stream.operators)
    lines += [f"take the first {stream.most:,} rows of each epoch"] if stream.most else []
    lines += [f"pack {stream.tokens[1]:,} of {stream.tokens[0]} a batch"] if stream.tokens else []
    lines.append(
        f"an epoch: {feed.rows:,} rows in {feed.steps.an_epoch:,} slices of {feed.steps.slice_rows:,}"
    )
    where = "threads of the trainer" if feed.engine == "local" else "Ray Data"
    lines.append(f"engine {feed.engine}: {where}, {stream.ahead} slices ahead")
    lines.append(f"manifest {feed.manifest.digest}")
    return "\n".join(lines)


def _explain_leaf(leaf: StreamLeaf) -> list[str]:
    """Describe the files of one leaf."""
    files, kept = leaf.manifest.files, len(leaf.groups)
    total = len(leaf.manifest.group_rows)
    lines = [
        f"read {leaf.form}: {len(files)} files, {_format_bytes(leaf.bytes)}, {leaf.manifest.rows:,} rows in {total} groups"
    ]
    names = leaf.files.columns or leaf.schema.names
    lines.append("  columns: " + ", ".join(f"{name} {leaf.schema.field(name).type}" for name in names))
    left_out = [name for name in leaf.schema.names if name not in names]
    lines += [f"  not read: {join_names(left_out)}"] if left_out else []
    if leaf.files.where:
        ruled_out = (
            f"; statistics rule out {total - kept} groups ({leaf.pruned_rows:,} rows)" if kept < total else ""
        )
        lines.append(f"  where {leaf.files.where}{ruled_out}")
    lines += ["  rows that are no good are skipped and counted"] if leaf.files.on_bad_rows == "skip" else []
    order = "the files' own" if leaf.order.seed is None else f"row groups shuffled by seed {leaf.order.seed}"
    inside = ", and rows inside each" if leaf.order.seed is not None and leaf.order.in_group else ""
    return [*lines, f"  order: {order}{inside}"]


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
