"""Conditions such as `rating >= 4 and event in ('cart', 'order')`, compiled to an Arrow expression.

The text is parsed by `ast` and compiled node by node; nothing is ever evaluated as Python. Allowed are comparisons (also
chained), `and`, `or`, `not`, `in`, `not in`, brackets, columns, numbers, text, true and false. A row in which a compared column
is null matches neither a condition nor its negation. `'shoes' in categories` asks for an element of a column of lists; a list
that holds a null counts as null.

An operand is a column or a literal. Its kind is "a number", "text", "true or false" or "a moment" (a date or timestamp); only
operands of the same kind can be compared, except that a text literal is read as a moment beside a column of moments.
"""

from __future__ import annotations

import ast
import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nonet.errors import ConfigError
from nonet.suggest import join_names, suggest_sentence

_functions: Any = pc  # these are generated at import time, so type checkers do not know them
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SEPARATOR = "\x1f"  # between the elements of a list that is joined to a text
_MAX_DEPTH = 64  # of brackets and negations, so that no code that walks through a condition runs out of stack
_ALLOWED = "comparisons, and, or, not, in, over columns, numbers and quoted text"  # For messages.


def compile_condition(text: str, schema: pa.Schema, *, name: str = "condition") -> pc.Expression:
    """Compile a condition to an Arrow expression over the columns of `schema`.

    Args:
        text: The condition.
        schema: Schema of the rows.
        name: Prefix of error messages.

    Raises:
        ConfigError: If the text is not a valid condition.
    """
    return _ConditionCompiler(str(text), schema, name).compile()


def match_rows(text: str, table: pa.Table, *, name: str = "condition") -> np.ndarray:
    """Return which rows [N] bool match a condition; a row for which the condition is null does not match.

    Args:
        text: The condition.
        table: The rows.
        name: Prefix of every error message.

    Raises:
        ConfigError: If the condition is not valid or cannot be computed.
    """
    import pyarrow.dataset as ds  # Imports pandas, half a second that processes without conditions need not pay.

    expression = compile_condition(text, table.schema, name=name)
    try:
        column = ds.dataset(table).scanner(columns={"match": expression}).to_table()["match"]
    except pa.ArrowException as error:
        raise ConfigError(f"{name}: {text!r} cannot be computed: {str(error).splitlines()[0]}") from None
    return column.combine_chunks().fill_null(False).to_numpy(zero_copy_only=False).astype(bool)


class _ConditionCompiler:
    """Compiles one condition to an Arrow expression; every method raises ConfigError for what is not allowed.

    Args:
        text: The condition.
        schema: Schema of the rows.
        name: Prefix of error messages.
    """

    def __init__(self, text: str, schema: pa.Schema, name: str):
        self.text, self.schema, self.name = text, schema, name

    def compile(self) -> pc.Expression:
        """Return the expression of the whole condition."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # For example about an unknown escape in quoted text.
                tree = ast.parse(self.text.strip(), mode="eval")
            if _measure_depth(tree) > _MAX_DEPTH:
                raise RecursionError
            return self._compile_boolean(tree.body)
        except SyntaxError as error:
            location = f" near character {error.offset}" if error.offset else ""
            hint = " Write == to compare." if _has_lone_equals(self.text) else ""
            raise self._make_error(f"is not a condition{location}.{hint} Allowed: {_ALLOWED}") from None
        except (RecursionError, MemoryError, ValueError):
            raise self._make_error(
                f"is nested more than {_MAX_DEPTH} levels deep, or holds an illegal character. Allowed: {_ALLOWED}"
            ) from None

    def _compile_boolean(self, node: ast.expr) -> pc.Expression:
        """Compile a node to an expression that is true or false for each row."""
        if isinstance(node, ast.BoolOp):
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return functools.reduce(join, [self._compile_boolean(value) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._compile_boolean(node.operand)
        if isinstance(node, ast.Compare):
            return self._compile_comparison(node)
        if self._is_column(node):
            kind = self._get_kind(node)
            if kind != "true or false":
                raise self._make_error(
                    f"uses column {ast.unparse(node)!r} ({self._format_type(node)}) alone; compare it with something"
                )
            return pc.field(self._get_field(node).name)
        raise self._make_error(f"holds {ast.unparse(node)!r}, which is not a condition. Allowed: {_ALLOWED}")

    def _compile_comparison(self, node: ast.Compare) -> pc.Expression:
        """Compile a chain of comparisons and memberships, such as `1 < a <= b`, to the conjunction of its pairs."""
        expressions, left = [], node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                is_member = self._compile_membership(left, right)
                expressions.append(is_member if isinstance(op, ast.In) else ~is_member)
            elif type(op) in _COMPARISONS:
                expressions.append(self._compile_pair(left, _COMPARISONS[type(op)], right))
            else:
                raise self._make_error("uses `is`; write == or != instead")
            left = right
        return functools.reduce(operator.and_, expressions)

    def _compile_pair(
        self, left: ast.expr, operation: Callable[[Any, Any], Any], right: ast.expr
    ) -> pc.Expression:
        """Compile the comparison of two operands, at least one of them a column."""
        kinds = [self._get_kind(left), self._get_kind(right)]
        column_nodes = [side for side in (left, right) if self._is_column(side)]
        if not column_nodes:
            raise self._make_error(
                f"compares {ast.unparse(left)} with {ast.unparse(right)}: no column among them"
            )
        if kinds[0] != kinds[1] and kinds != ["a moment", "text"] and kinds != ["text", "a moment"]:
            raise self._make_mismatch_error(column_nodes[0], right if column_nodes[0] is left else left)
        column_type = self._get_field(column_nodes[0]).type
        return operation(self._compile_operand(left, column_type), self._compile_operand(right, column_type))

    def _compile_membership(self, left: ast.expr, right: ast.expr) -> pc.Expression:
        """Compile `column in (literals)` or `literal in column`; a row with null matches neither it nor its negation."""
        if self._is_column(right):
            return self._compile_list_membership(left, right)
        if not self._is_column(left):
            raise self._make_error(f"needs a column before `in`, not {ast.unparse(left)!r}")
        if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not right.elts:
            raise self._make_error(f"needs a list after `in`, such as ('a', 'b'), not {ast.unparse(right)!r}")
        for value in right.elts:
            if self._is_column(value):
                raise self._make_error(
                    f"has column {ast.unparse(value)!r} inside `in`; only literals can stand there"
                )
            kinds = (self._get_kind(left), self._get_kind(value))
            if kinds[0] != kinds[1] and kinds != ("a moment", "text"):
                raise self._make_mismatch_error(left, value)
        column_type = self._get_field(left).type
        try:
            values = pa.array([self._read_literal(value, column_type) for value in right.elts])
            if not pa.types.is_integer(column_type) or pa.types.is_integer(values.type):
                values = values.cast(column_type)
        except (pa.ArrowException, OverflowError):
            raise self._make_error(
                f"has values in `in` that do not fit column {ast.unparse(left)!r} ({column_type})"
            ) from None
        column = pc.field(self._get_field(left).name)
        # `isin` is false for null; `or` with this null makes it null, so that the negation is null as well.
        null_if_missing = pc.scalar(pa.scalar(None, pa.bool_())) & column.is_null()
        return column.isin(values) | null_if_missing

    def _compile_list_membership(self, element: ast.expr, column: ast.expr) -> pc.Expression:
        """Compile `element in column`, where the column has lists of text or whole numbers."""
        name, column_type = ast.unparse(column), self._get_field(column).type
        value_type = getattr(column_type, "value_type", None) if pa.types.is_nested(column_type) else None
        is_number = value_type is not None and pa.types.is_integer(value_type)
        is_text = value_type is not None and (
            pa.types.is_string(value_type) or pa.types.is_large_string(value_type)
        )
        if not (is_number or is_text):
            raise self._make_error(
                f"looks for {ast.unparse(element)} in column {name!r} ({column_type}); `in` needs a column with lists of text or "
                "whole numbers, or a list such as ('a', 'b')"
            )
        kind = "a number" if is_number else "text"
        if self._is_column(element) or self._get_kind(element) != kind:
            raise self._make_error(
                f"looks for {ast.unparse(element)} in column {name!r} ({column_type}); write {kind} before `in`"
            )
        value = self._read_literal(element, value_type)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        # Arrow has no function that finds an element, so lists are joined to a text with a separator around each element.
        separator = pc.scalar(_SEPARATOR)
        joined = _functions.binary_join(pc.field(name).cast(pa.list_(pa.string())), separator)
        surrounded = _functions.binary_join_element_wise(pc.scalar(""), joined, pc.scalar(""), separator)
        return _functions.match_substring(surrounded, f"{_SEPARATOR}{value}{_SEPARATOR}")

    def _compile_operand(self, node: ast.expr, column_type: pa.DataType) -> Any:
        """Compile a column, or a literal that is compared with a column of `column_type`."""
        if self._is_column(node):
            return pc.field(self._get_field(node).name)
        value = self._read_literal(node, column_type)
        try:
            needs_column_type = pa.types.is_floating(column_type) or pa.types.is_temporal(column_type)
            return pc.scalar(pa.scalar(value, type=column_type if needs_column_type else None))
        except (pa.ArrowException, OverflowError):
            raise self._make_error(f"has {value!r}, which does not fit a column of {column_type}") from None

    def _read_literal(self, node: ast.expr, column_type: pa.DataType) -> Any:
        """Return the Python value of a literal that is compared with a column of `column_type`."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self._read_literal(node.operand, column_type)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Name):  # A name that is no column is true or false.
            return node.id.lower() == "true"
        assert isinstance(node, ast.Constant)
        if pa.types.is_temporal(column_type):
            return self._parse_timestamp(str(node.value), column_type)
        return node.value

    def _parse_timestamp(self, text: str, column_type: pa.DataType) -> Any:
        """Parse an ISO timestamp or date to a date or datetime, depending on the type of a temporal column."""
        try:
            timestamp = datetime.fromisoformat(text)
        except ValueError:
            raise self._make_error(
                f"compares a column of {column_type} with {text!r}, which is not an ISO timestamp such as 2026-11-19"
            ) from None
        return timestamp.date() if pa.types.is_date(column_type) else timestamp

    def _get_kind(self, node: ast.expr) -> str:
        """Return the kind of an operand: "a number", "text", "true or false" or "a moment".

        Raises:
            ConfigError: If the column is unknown or the construct is not allowed.
        """
        if self._is_column(node):
            return self._get_column_kind(node)
        if isinstance(node, ast.Name):
            return "true or false"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            if self._get_kind(node.operand) == "a number" and not self._is_column(node.operand):
                return "a number"
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                return "true or false"
            if isinstance(node.value, int | float):
                return "a number"
            if isinstance(node.value, str):
                return "text"
        raise self._make_error(f"holds {ast.unparse(node)!r}. Allowed: {_ALLOWED}")

    def _get_column_kind(self, node: ast.expr) -> str:
        """Return the kind of a column by its type."""
        kind = self._get_field(node).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_boolean(kind):
            return "true or false"
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return "a number"
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "text"
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return "a moment"
        hint = f"; write 'a' in {ast.unparse(node)} to find an element" if pa.types.is_nested(kind) else ""
        raise self._make_error(
            f"uses column {ast.unparse(node)!r} of type {kind}, which cannot be compared{hint}"
        )

    def _is_column(self, node: ast.expr) -> bool:
        """Return whether a node is a name other than true and false; a column may have one of these names, too."""
        if not isinstance(node, ast.Name):
            return False
        return node.id in self.schema.names or node.id.lower() not in ("true", "false")

    def _get_field(self, node: ast.expr) -> pa.Field:
        """Return the schema's field of a column. Raises ConfigError if there is none."""
        assert isinstance(node, ast.Name)
        if node.id not in self.schema.names:
            near = suggest_sentence(node.id, self.schema.names)
            raise self._make_error(
                f"names column {node.id!r}, which is not there.{near} There are: {join_names(self.schema.names)}"
            )
        return self.schema.field(node.id)

    def _format_type(self, node: ast.expr) -> str:
        return str(self._get_field(node).type)

    def _make_mismatch_error(self, column: ast.expr, other: ast.expr) -> ConfigError:
        """Build the error for a column that is compared with another kind of value."""
        other_text = ast.unparse(other)
        description = (
            f"column {other_text!r}, which is" if self._is_column(other) else f"{other_text}, which is"
        )
        return self._make_error(
            f"compares column {ast.unparse(column)!r} ({self._format_type(column)}, {self._get_kind(column)}) with "
            f"{description} {self._get_kind(other)}. Compare it with {self._get_kind(column)}"
        )

    def _make_error(self, problem: str) -> ConfigError:
        """Build the error whose message is the (shortened) condition followed by the problem, such as "uses `is`"."""
        shown_text = self.text if len(self.text) <= 200 else self.text[:200] + "..."
        return ConfigError(f"{self.name}: {shown_text!r} {problem}.")


def _measure_depth(tree: ast.AST) -> int:
    """Return how deeply the nodes of a tree are nested."""
    depth, level = 0, list(ast.iter_child_nodes(tree))
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def list_names(text: str) -> set[str]:
    """Return all names in a condition, of columns, true and false.

    Returns:
        The names; an empty set if the condition cannot be parsed, which `compile_condition` reports.
    """
    return {node.id for node in _list_nodes(text) if isinstance(node, ast.Name)}


def infer_types(text: str, known: Mapping[str, pa.DataType]) -> dict[str, pa.DataType | None]:
    """Return the type of each column in a valid condition, as it follows from the condition, for tables without the column.

    A column that is used alone is true or false; one that is compared has the kind of the literals or of the other column.

    Args:
        text: The condition.
        known: Types of columns that are known.

    Returns:
        The known type, or bool, string, float64 for a number, or a list; None for columns that are only compared with each other.
    """
    types, pairs = dict(known), list[tuple[str, str]]()
    for node in _list_nodes(text):
        alone = list(node.values) if isinstance(node, ast.BoolOp) else []
        alone += [node.operand] if isinstance(node, ast.UnaryOp) else []
        alone += [node.body] if isinstance(node, ast.Expression) else []
        for each in alone:
            types.setdefault(_get_column_name(each), pa.bool_())
        if isinstance(node, ast.Compare):
            for left, op, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                names = (_get_column_name(left), _get_column_name(right))
                kinds = [_get_literal_type(each) for each in (left, *getattr(right, "elts", (right,)))]
                kind = next((each for each in kinds if each is not None), None)
                if kind is None:
                    pairs.append(names)
                elif isinstance(op, ast.In | ast.NotIn) and names[1]:
                    types.setdefault(names[1], pa.list_(pa.int64() if kind == pa.float64() else kind))
                else:
                    types |= {name: types.get(name, kind) for name in names}
    for left, right in pairs * len(pairs):  # as often as a kind may be handed on
        if (kind := types.get(left, types.get(right))) is not None:
            types |= {name: types.get(name, kind) for name in (left, right)}
    columns = {_get_column_name(node) for node in _list_nodes(text)} - {""}
    return {name: types.get(name) for name in columns}


def _get_column_name(node: ast.AST) -> str:
    """Return the name of the column that a node is; "" for others, such as true."""
    return node.id if isinstance(node, ast.Name) and node.id.lower() not in ("true", "false") else ""


def _get_literal_type(node: ast.AST) -> pa.DataType | None:
    """Return bool, string or float64 for a literal; None for a column."""
    if isinstance(node, ast.Name):
        return None if _get_column_name(node) else pa.bool_()
    value = getattr(node, "value", 0)  # a number with a sign has none
    return pa.bool_() if isinstance(value, bool) else pa.string() if isinstance(value, str) else pa.float64()


def _list_nodes(text: str) -> list[ast.AST]:
    """Return all nodes of a condition; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(ast.walk(ast.parse(str(text).strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _has_lone_equals(text: str) -> bool:
    """Return whether a text has a single `=` that is not a part of `==`, `<=`, `>=` or `!=`."""
    return any(
        char == "=" and text[i - 1 : i] not in ("=", "<", ">", "!") and text[i + 1 : i + 2] != "="
        for i, char in enumerate(text)
    )
