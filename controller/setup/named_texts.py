"""The modules that a program imports, and its texts that may name files.

A text with a dot or a slash may name a file, unless it is a key, is compared, or stands alone. A word without them, such as
"conf", names none either where it is an argument, unless the name of the function or the argument is about files, such as
`load_words("conf")` or `folder="conf"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

_FILE_WORD = re.compile(
    r"(?<![a-z])(open|read|load|import|exists|join)|pretrained|path|file|folder|dir(s|ectory)?(?![a-z])"
)
_LOOKUPS = ("get", "getenv", "getLogger", "pop", "setdefault")  # whose first argument is a key
_VALUE_IN_TEXT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdifgrx]|\{[^{}]*\}")  # in a text that % or format fills


def list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the modules and packages that a program imports, without what follows a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module.partition(".")[0]
            if node.level:
                yield from (alias.name for alias in node.names)


def list_named_patterns(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a program that may name files, as paths in which * stands for a value."""
    silent = set[ast.AST | None]()  # nodes that name no file
    words = set[ast.AST]()  # nodes that name none without a dot or slash
    path_parts = set[ast.AST]()  # nodes that begin a longer path
    for node in ast.walk(tree):
        silent |= {each for part in _list_silent_parts(node) for each in (part, *getattr(part, "elts", ()))}
        words |= {part for argument in _list_plain_arguments(node) for part in _iterate_own_nodes(argument)}
        if isinstance(node, ast.expr) and node not in path_parts:
            inner, steps = _list_steps(node)
            path_parts |= inner
            if steps:
                silent |= set(steps)
                yield "/".join(str(step.value) for step in steps)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            yield from _list_filled(text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            yield from () if node in words and not {".", "/"} & set(node.value) else (node.value,)
            yield from _list_filled(_VALUE_IN_TEXT.sub("*", node.value))


def _list_silent_parts(node: ast.AST) -> Sequence[ast.AST | None]:
    """Return the parts of a node whose own texts, or those of the list that a part is, name no files."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Dict() | ast.MatchMapping():
            return node.keys
        case ast.Subscript():
            return [node.slice]
        case ast.Expr() | ast.MatchValue():
            return [node.value]
        case ast.JoinedStr():
            return node.values
        case ast.Call() if _get_function_name(node) in _LOOKUPS:
            return node.args[:1]
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):  # such as __all__
            return [node.value]
        case _:
            return []


def _list_plain_arguments(node: ast.AST) -> Iterator[ast.expr]:
    """Yield arguments of a call or defaults of a function, unless the function's or the argument's name is about files."""
    named_values: list[tuple[str | None, ast.expr | None]] = []
    function = ""
    if isinstance(node, ast.Call):
        function, keywords = (
            _get_function_name(node),
            [(keyword.arg, keyword.value) for keyword in node.keywords],
        )
        named_values = [*((None, value) for value in node.args), *keywords]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, declared = node.name, node.args
        positional = [*declared.posonlyargs, *declared.args]
        with_default = [*positional[len(positional) - len(declared.defaults) :], *declared.kwonlyargs]
        values = [*declared.defaults, *declared.kw_defaults]
        named_values = [(each.arg, value) for each, value in zip(with_default, values, strict=True)]
    if function in _LOOKUPS:  # what follows a key is a value like those of variables
        return
    for name, value in named_values:
        if value is not None and not _FILE_WORD.search(f"{function} {name or ''}".lower()):
            yield value


def _get_function_name(call: ast.Call) -> str:
    """Return the last part of the name of a called function, such as `join`; "" for a method of a text, or without a name."""
    is_of_text = isinstance(getattr(call.func, "value", None), ast.Constant)  # such as ", ".join
    return "" if is_of_text else getattr(call.func, "attr", getattr(call.func, "id", ""))


def _iterate_own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, except calls and what is below them."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.Call):
            yield node
            nodes += ast.iter_child_nodes(node)


def _list_steps(node: ast.expr) -> tuple[set[ast.expr], list[ast.Constant]]:
    """Return the texts that a path such as `folder / "a" / "b.txt"` goes down by, up to the first value that is no text.

    Steps may also be arguments of `os.path.join`, `joinpath` and `Path`.

    Returns:
        The nodes that are parts of the path and paths themselves, and the texts.
    """
    inner, steps = set[ast.expr](), list[ast.expr]()
    while True:
        function = _get_function_name(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            before, further = node.left, [node.right]
        elif isinstance(node, ast.Call) and function == "joinpath" and isinstance(node.func, ast.Attribute):
            before, further = node.func.value, node.args
        elif isinstance(node, ast.Call) and function in ("join", "Path") and node.args:
            before, *further = node.args
        else:
            break
        node, steps = before, [*further, *steps]
        inner.add(node)
    is_text = isinstance(node, ast.Constant)  # such as the first argument of `Path`
    operands = [node, *steps] if inner and is_text else steps
    texts = (
        each if isinstance(each, ast.Constant) and isinstance(each.value, str) else None for each in operands
    )
    return inner, [each for each in takewhile(lambda text: text is not None, texts) if each is not None]


def _list_filled(pattern: str) -> Iterator[str]:
    """Yield a text with values as a pattern if it says more of a name than its ending, by which `f"{x}.json"` is any file."""
    if "*" in pattern and Path(pattern).suffix and re.search(r"\w", pattern[: -len(Path(pattern).suffix)]):
        yield pattern
