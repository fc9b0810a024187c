"""EventLabeller: the label of events by a stage's target condition, computed from their columns."""

# Shapes: n events.

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError
from nonet.models.clicks.known_clicks import LIKED, NOT_LIKED, UNLABELLED
from nonet.samples.sequences import LABEL_TIME
from nonet.samples.tables import NONE, as_numbers, list_names, match_rows

_KIND = "event"  # the column of the kind of an event


class EventLabeller:
    """Labels events whose columns are stored as sequences store them: text as hashes, numbers as float32.

    Args:
        stage: The stage whose target labels events.
        condition: The target condition.
        columns: Names of the columns of events.
        kinds: Kinds of events.

    Raises:
        ConfigError: The condition reads a column that the events lack.
    """

    def __init__(self, stage: str, condition: str, columns: Sequence[str], kinds: Sequence[str]):
        self._kinds = np.array(kinds or [""], object)
        self._names = [name for name in list_names(condition) if name != _KIND]
        missing = [name for name in self._names if name not in columns]
        if missing:
            raise ConfigError(
                f"stages.{stage}.target: {condition!r} reads {missing[0]!r}, which events do not have as a number or text, so "
                "they cannot be labelled; use a column of numbers or text"
            )
        self._label_time = LABEL_TIME + stage
        self._condition = ast.unparse(_StoredForm().visit(ast.parse(condition.strip(), mode="eval")))

    def label_events(self, columns: Mapping[str, np.ndarray], kind: np.ndarray) -> np.ndarray:
        """Return LIKED, NOT_LIKED, or UNLABELLED where a column of the condition is missing, for each event [n].

        Args:
            columns: Columns [n] of the events.
            kind: Index [n] of the kind of each event.
        """
        if not len(kind):
            return np.empty(0, np.int64)
        table = {name: _mark_missing(columns[name]) for name in self._names}
        table[_KIND] = pa.array(self._kinds[kind].tolist())
        rows = pa.table(table)
        liked = match_rows(self._condition, rows, name="target")
        not_liked = match_rows(f"not ({self._condition})", rows, name="target")
        return np.select([liked, not_liked], [LIKED, NOT_LIKED], UNLABELLED)

    def hide_later_labels(self, label: np.ndarray, columns: Mapping[str, np.ndarray], now: int) -> np.ndarray:
        """Return labels [n] with UNLABELLED for those that are known in or after the second `now`, as `data.labels` says."""
        if self._label_time not in columns:
            return label
        return np.where(columns[self._label_time] < now, label, UNLABELLED)


def _mark_missing(values: np.ndarray) -> pa.Array:
    """Convert a stored column to Arrow, with null for NaN and NONE."""
    if values.dtype.kind == "f":
        return pa.array(np.asarray(values, np.float64), from_pandas=True)
    return pa.array(values, mask=np.asarray(values) == NONE)


class _StoredForm(ast.NodeTransformer):
    """Changes a condition over tables into one over stored columns: text and true become numbers, numbers are rounded."""

    def visit_Expression(self, node: ast.Expression) -> ast.Expression:
        return ast.Expression(self._make_test(node.body))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        return ast.BoolOp(node.op, [self._make_test(value) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        if isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._make_test(node.operand))
        return ast.UnaryOp(node.op, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Convert the operands of a comparison; one with the kind of event stays as it is."""
        operands = [node.left, *node.comparators]
        if any(isinstance(operand, ast.Name) and operand.id == _KIND for operand in operands):
            return node
        left, *comparators = [self.visit(operand) for operand in operands]
        return ast.Compare(left, node.ops, comparators)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Convert a constant to the number that columns store: text to its hash, a float to float32, a boolean to 0 or 1."""
        value = node.value
        if isinstance(value, bool):
            return ast.Constant(int(value))
        if isinstance(value, str):
            return ast.Constant(int(as_numbers(pa.array([value]))[0]))
        return ast.Constant(float(np.float32(value)) if isinstance(value, float) else value)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace `true` and `false` by 1 and 0, as which columns store them; other names stay."""
        name = node.id.lower()
        return ast.Constant(int(name == "true")) if name in ("true", "false") else node

    def _make_test(self, node: ast.expr) -> ast.expr:
        """Change a condition that is only a column into a comparison, because true is stored as 1."""
        if isinstance(node, ast.Name):
            return ast.Compare(node, [ast.NotEq()], [ast.Constant(0)])
        return self.visit(node)
