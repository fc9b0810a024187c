"""What a stream reads and does, as data: `Stream` builds it, `StreamFeed` opens it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nonet.errors import ConfigError
from nonet.samples.streams.operators import Operator


@dataclass(frozen=True)
class StreamFiles:
    """The files to read.

    Attributes:
        paths: Paths, globs, folders or URIs, in order.
        format: Format of the files; None to detect it.
        columns: Columns to read; None for all.
        where: Condition on the rows.
        on_bad_rows: "fail" or "skip".
        ids: Columns without nulls and numbers above 2^63; None for every integer column that is read.
        present_ids: As `ids`, for columns that the files may lack because a map adds them.
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
        seed: Seed of the order; None for the order of the files.
        in_group: Whether the rows of each row group are shuffled too.
        tokens: Column whose lists are packed, and the largest sum of their lengths in a batch; None for no packing.
        ahead: Number of slices that are prepared ahead of the reader.
        most: Rows of an epoch, counted before filters; None for all.
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
    """Return which stream provides each of 1,000 rows of a mixture [1000], evenly spread."""
    counts = np.floor(np.cumsum(shares) * 1000 + 0.5).astype(int)
    counts = np.diff(np.concatenate([[0], counts]))
    if (counts == 0).any():
        raise ConfigError("mix: a share below 0.0005 is zero in a thousand rows")
    due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner[np.argsort(due, kind="stable")]
