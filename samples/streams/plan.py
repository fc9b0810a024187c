"""The description of what a stream reads and does; `Stream` builds it and `StreamFeed` opens it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nonet.errors import ConfigError
from nonet.samples.streams.operators import Operator


@dataclass(frozen=True)
class StreamFiles:
    """The files of a stream and how their rows are checked.

    Attributes:
        paths: Paths, globs, folders or URIs, in order.
        format: Format of the files; None to detect it.
        columns: Columns to read; None for all.
        where: Condition on the rows.
        on_bad_rows: "fail" to raise an error at the first bad row, or "skip" to leave out and count bad rows.
        ids: Columns in which a null or a number above 2^63 - 1 makes a row bad; None for every integer column that is read.
        present_ids: As `ids`, but files may lack such a column because a `map` adds it; used if `ids` is None.
    """

    paths: tuple[str, ...]
    format: str | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    on_bad_rows: str = "fail"
    ids: tuple[str, ...] | None = None
    present_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """The files, order and operators of a stream.

    Attributes:
        files: The files to read; None for a mixture.
        mixed: The streams of a mixture with their shares; empty if `files` are read.
        operators: Operators in the order in which they are applied.
        seed: Seed of the random order; None for the order of the files.
        in_group: Whether the rows of each row group are shuffled too.
        tokens: Column whose lists are packed, and the maximum sum of their lengths in a batch; None for no packing.
        ahead: Number of slices that are prepared ahead of the caller.
        most: Maximum number of rows of an epoch, counted before filters; None for all.
    """

    files: StreamFiles | None = None
    mixed: tuple[tuple[StreamPlan, float], ...] = ()
    operators: tuple[Operator, ...] = ()
    seed: int | None = None
    in_group: bool = True
    tokens: tuple[str, int] | None = None
    ahead: int = 4
    most: int | None = None


def schedule_turns(shares: Sequence[float]) -> np.ndarray:
    """Assign 1,000 rows of a mixture to its streams, so that the rows of each stream are evenly spread.

    Args:
        shares: The share of each stream; they sum to 1.

    Returns:
        The index of the stream that provides each row, [1000].

    Raises:
        ConfigError: If a share is rounded to no row at all.
    """
    # The cumulative counts are rounded, so that the counts sum to 1,000.
    cumulative_counts = np.floor(np.cumsum(shares) * 1000 + 0.5).astype(int)
    row_counts = np.diff(np.concatenate([[0], cumulative_counts]))
    if (row_counts == 0).any():
        raise ConfigError("mix: a share below 0.0005 is zero in a thousand rows")
    # The i-th of a stream's c rows is due at (i + 0.5) / c of the 1,000 rows.
    due_times = np.concatenate([(np.arange(row_count) + 0.5) / row_count for row_count in row_counts])
    stream_of_row = np.repeat(np.arange(len(row_counts)), row_counts)
    return stream_of_row[np.argsort(due_times, kind="stable")]
