"""A lazy chain of operations on files of rows; each operation returns a new stream, and nothing is read before iteration.

stream = (
    nonet.samples.read("events/dt=2026-11-*/*.parquet", columns=["user_id", "items"], where="label == 1")
    .map(features, batch=4096, workers=2)
    .shuffle(seed=7)
    .prefetch(8)
)
print(stream.explain())
for batch in stream:
    learn(batch["items"])        # Jagged: values [N], offsets [B + 1]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nonet.errors import ConfigError
from nonet.samples.ledger import DataManifest
from nonet.samples.streams.batch import StreamBatch
from nonet.samples.streams.feed import StreamFeed
from nonet.samples.streams.operators import (
    FilterOperator,
    JoinOperator,
    MapOperator,
    Operator,
    TokenizeOperator,
)
from nonet.samples.streams.plan import StreamFiles, StreamPlan

ROWS = 4096
"""Default number of rows of a slice, which becomes one batch unless the stream packs, and of a call of a `map` function."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, eq=False)
class Stream(StreamPlan):
    """A lazy chain of operations on the rows of files, or of a mixture of other streams. See the module.

    Attributes: see `StreamPlan`.
    """

    def map(self, function: Any, *, batch: int = ROWS, workers: int = 1) -> Stream:
        """Apply a function to the rows. The number of rows may change.

        Args:
            function: A function of a RecordBatch; see `operators.MapOperator`.
            batch: Maximum number of rows per call.
            workers: Maximum number of calls at the same time.
        """
        return self._append_operator(MapOperator(function, batch, workers))

    def filter(self, keep: Any) -> Stream:
        """Keep the rows that meet a condition ("rating >= 4") or for which a function returns true (`operators.FilterOperator`).

        If a condition is the first operation, row groups that cannot meet it according to their statistics are not read.
        """
        can_prune = (
            self.files is not None and not self.operators and isinstance(keep, str) and ":" not in keep
        )
        if can_prune and self.files is not None:
            where = keep if self.files.where is None else f"({self.files.where}) and ({keep})"
            return replace(self, files=replace(self.files, where=where))
        return self._append_operator(FilterOperator(keep))

    def tokenize(self, sids: Any, column: str = "item_id") -> Stream:
        """Add `sid`, the semantic ids of a column's items; see `operators.TokenizeOperator`."""
        return self._append_operator(TokenizeOperator(sids, column))

    def join(self, store: Any, *, on: str, columns: Any, as_of: str | None = None) -> Stream:
        """Add columns of a store by the ids of a column; see `operators.JoinOperator`."""
        return self._append_operator(JoinOperator(store, on, columns, as_of))

    def pack(self, tokens: int, column: str = "item_id") -> Stream:
        """Cut batches in which the lengths of a list column sum to at most `tokens`; a longer list is a batch of its own.

        This must be the last operation.
        """
        return replace(self, tokens=(column, tokens))

    def shuffle(self, seed: int, *, in_group: bool = True) -> Stream:
        """Read row groups in a random order that the seed determines, and with `in_group` also the rows within each group."""
        if self.mixed:
            raise ConfigError("shuffle what is mixed, not the mixture: a.shuffle(1).mix({b.shuffle(2): 0.3})")
        return replace(self, seed=seed, in_group=in_group)

    def mix(self, shares: Mapping[Stream, float]) -> Stream:
        """Mix rows of several streams by their shares, rounded to thousandths.

        This stream gets the remaining share unless it is in `shares`. Each stream starts over when it ends; an epoch of the
        mixture ends when the stream that lasts longest was read once.

        Raises:
            ConfigError: If shares are invalid, or a stream is itself mixed or packed.
        """
        all_shares = dict(shares) if self in shares else {self: 1 - sum(shares.values()), **shares}
        if any(share <= 0 for share in all_shares.values()) or abs(sum(all_shares.values()) - 1) > 1e-6:
            raise ConfigError(
                f"mix: shares must be above 0 and sum to 1, got {[round(share, 6) for share in all_shares.values()]}"
            )
        if any(stream.mixed or stream.tokens for stream in all_shares):
            raise ConfigError(
                "mix: streams that are mixed or packed themselves cannot be mixed; pack the mixture"
            )
        return Stream(mixed=tuple(all_shares.items()), ahead=self.ahead)

    def prefetch(self, slices: int) -> Stream:
        """Set the number of slices that are prepared ahead of the caller; 0 reads in the caller's own thread."""
        return replace(self, ahead=slices)

    def take(self, rows: int) -> Stream:
        """Keep the first `rows` rows of each epoch's order, counted before filters."""
        return replace(self, most=rows if self.most is None else min(rows, self.most))

    def open(
        self,
        *,
        rows: int = ROWS,
        step_rows: int | None = None,
        engine: str | None = None,
        manifest: DataManifest | None = None,
        name: str = "",
    ) -> StreamFeed:
        """Inspect the files and return a `StreamFeed`.

        Args:
            rows: Number of rows of a slice.
            step_rows: Number of rows of a global step; by default `rows`.
            engine: "local" or "ray"; None to choose by the size of the files.
            manifest: The files as an earlier opening found them; footers are then not read again.
            name: Name, such as that of a stage, that the random order depends on in addition to the seed, so that two stages
                read in different orders.

        Raises:
            DataError: If files cannot be read.
            ConfigError: If an option is invalid.
        """
        return StreamFeed(self, rows, step_rows or rows, engine, manifest, name)

    def __iter__(self) -> Iterator[StreamBatch]:
        """Iterate over the batches of one epoch."""
        return iter(self.open().iterate_epoch(0))

    def explain(self, engine: str | None = None) -> str:
        """Return a description of the plan, in lines: files, columns, order, operators and engine."""
        return self.open(engine=engine).explain()

    def _append_operator(self, operator: Operator) -> Stream:
        if self.tokens:
            raise ConfigError(
                "pack must be the last operation of a chain, because a later one would see cut batches"
            )
        return replace(self, operators=(*self.operators, operator))


def read(
    paths: Paths,
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    on_bad_rows: str = "fail",
    ids: Sequence[str] | None = None,
) -> Stream:
    """Create a stream of the rows of files. Nothing is opened yet.

    Args:
        paths: Paths, globs, folders, `s3://` and other URIs; one that is listed twice is read twice.
        format: parquet, arrow (packed), csv or lines (`user item item ...`); None to detect it from the ending.
        columns: Columns to read; None for all.
        where: Condition on the rows; row groups that cannot match according to their statistics are not read.
        on_bad_rows: "fail", or "skip" to leave out and count bad rows.
        ids: Columns that hold ids; see `StreamFiles`.
    """
    if on_bad_rows not in ("fail", "skip"):
        raise ConfigError(f"on_bad_rows: {on_bad_rows!r}; there are fail and skip")
    path_list = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    path_texts = tuple(os.fspath(path) for path in path_list)
    if not path_texts:
        raise ConfigError("read: no path was given")
    column_names = None if columns is None else tuple(columns)
    return Stream(
        StreamFiles(path_texts, format, column_names, where, on_bad_rows, None if ids is None else tuple(ids))
    )
