"""The Arrow form of exported rows: key int64, row and state fixed-size lists of float32, step int64, op string.

For an optimizer without state, `state` has variable-size empty lists, because Parquet cannot read fixed-size lists of length 0.
`step` is the step that last changed the row; with it, a loaded table exports the same deltas as the saved one. Tables with an
eviction policy have the columns `seen` and `uses` too. Tables with an admission policy also export rows of op "wait", for keys
that have no row yet.
"""

# Shapes: N rows, D width, S elements of optimizer state per row.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nonet.embedding.tables.protocol import DELETE, UPSERT
from nonet.errors import DataError

WAIT = "wait"  # The op of a key that waits for admission.


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of an exported table as NumPy arrays.

    Attributes:
        key: Keys, int64 [N].
        row: Values, float32 [N, D].
        state: Optimizer state, float32 [N, S].
        step: The step that last changed each row, int64 [N]; for a waiting key its packed admission count.
        deleted: Which keys are deleted; their rows have no meaning, bool [N].
        seen: The step in which each row was last looked up [N]; None without an eviction policy.
        uses: The number of steps that looked each row up [N]; None without an eviction policy.
        waiting: Which keys wait for admission and have no row, bool [N]; None for none.
    """

    key: np.ndarray
    row: np.ndarray
    state: np.ndarray
    step: np.ndarray
    deleted: np.ndarray
    seen: np.ndarray | None = None
    uses: np.ndarray | None = None
    waiting: np.ndarray | None = None

    def select(self, mask: np.ndarray) -> RowColumns:
        """Return the rows that `mask` selects: bool [N], or the row indices in the order of the result."""
        seen = None if self.seen is None else self.seen[mask]
        uses = None if self.uses is None else self.uses[mask]
        waiting = None if self.waiting is None else self.waiting[mask]
        return RowColumns(
            self.key[mask], self.row[mask], self.state[mask], self.step[mask], self.deleted[mask],
            seen, uses, waiting,
        )  # fmt: skip


def to_arrow_table(
    key: np.ndarray,
    row: np.ndarray,
    state: np.ndarray,
    step: np.ndarray,
    seen: np.ndarray | None = None,
    uses: np.ndarray | None = None,
    op: str = UPSERT,
) -> pa.Table:
    """Build an Arrow table of rows that share one `op`.

    Args:
        key: Keys, int64 [N].
        row: Values, float32 [N, D].
        state: Optimizer state, float32 [N, S].
        step: The step that last changed each row, int64 [N].
        seen: The step in which each row was last looked up [N].
        uses: The number of steps that looked each row up [N].
        op: The op of all rows.

    Returns:
        The table; it has the columns seen and uses if both are given.
    """
    columns = {
        "key": pa.array(key, pa.int64()),
        "row": _to_lists(row),
        "state": _to_lists(state),
        "step": pa.array(step, pa.int64()),
        "op": pa.array([op] * len(key), pa.string()),
    }
    if seen is not None and uses is not None:
        columns |= {"seen": pa.array(seen, pa.int64()), "uses": pa.array(uses, pa.int64())}
    return pa.table(columns)


def from_arrow_table(
    table: pa.Table, name: str, dim: int, state_width: int = 0, waiting: bool = False
) -> RowColumns:
    """Check the columns of an exported table and convert them to NumPy.

    Args:
        table: The exported table.
        name: The name of the sparse table, for errors.
        dim: D, the expected width of a row.
        state_width: S, the expected width of the state; 0 skips the state.
        waiting: Whether to include keys that wait for a row.

    Returns:
        The columns; a missing column `step` is zeros, a missing `op` means that all rows are upserts.

    Raises:
        DataError: If a column is missing, has another width, or an op is unknown.
    """
    missing_columns = [column for column in ("key", "row") if column not in table.column_names]
    if missing_columns:
        raise DataError(
            f"the rows of table {name!r} lack the columns {missing_columns}; they have {table.column_names}"
        )
    count = table.num_rows
    row = _read_matrix(table, "row", name, dim)
    no_state = np.zeros((count, 0), dtype=np.float32)
    state = _read_matrix(table, "state", name, state_width) if state_width else no_state
    step = _read_numbers(table, "step")
    op = table["op"].to_numpy() if "op" in table.column_names else np.full(count, UPSERT, dtype=object)
    unknown_ops = set(op) - {UPSERT, DELETE, WAIT}
    if unknown_ops:
        raise DataError(
            f"the rows of table {name!r} have unknown ops {sorted(unknown_ops)}; the ops are {UPSERT!r}, {DELETE!r}, {WAIT!r}"
        )
    policy = {
        column: _read_numbers(table, column) if column in table.column_names else None
        for column in ("seen", "uses")
    }
    is_waiting = op == WAIT
    columns = RowColumns(
        table["key"].to_numpy(),
        row,
        state,
        np.zeros(count, dtype=np.int64) if step is None else step,
        op == DELETE,
        policy["seen"],
        policy["uses"],
        is_waiting,
    )
    return columns.select(~is_waiting) if is_waiting.any() and not waiting else columns


def _read_numbers(table: pa.Table, column: str) -> np.ndarray | None:
    """Return a column of numbers, or None if the table does not have it."""
    return table[column].to_numpy() if column in table.column_names else None


def _to_lists(matrix: np.ndarray) -> pa.Array:
    """Convert a matrix to an array of fixed-size lists; of variable-size lists if it has no columns."""
    if not matrix.shape[1]:
        return pa.array([[]] * len(matrix), pa.list_(pa.float32()))
    flat = pa.array(np.ascontiguousarray(matrix, dtype=np.float32).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def _read_matrix(table: pa.Table, column: str, name: str, width: int) -> np.ndarray:
    """Return a column of fixed-size lists as float32 [N, width]."""
    arrow_type = table[column].type if column in table.column_names else None
    if arrow_type is None or not pa.types.is_fixed_size_list(arrow_type) or arrow_type.list_size != width:
        got = "no such column" if arrow_type is None else str(arrow_type)
        raise DataError(
            f"table {name!r} needs column {column} with {width} float32 per row, got {got}; was it saved with other settings?"
        )
    flat = table[column].combine_chunks().flatten().to_numpy().astype(np.float32, copy=False)
    return flat.reshape(table.num_rows, width)
