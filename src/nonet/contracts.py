"""Contracts of plug-ins: the methods that an object of a kind must have, and the arguments that they must accept.

A base class or protocol declares the contract. The error for a plug-in that breaks it is one line, which names the file of
the plug-in, what is wrong, and the page of the documentation that shows a correct one.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from nonet.errors import ConfigError
from nonet.suggest import suggest_inline

F = TypeVar("F", bound=Callable[..., Any])


def mark_optional(method: F) -> F:
    """Mark a method of a contract as one that a plug-in may leave out, and return the method (a decorator)."""
    method.__nonet_optional__ = True  # type: ignore[attr-defined]
    return method


def check_class(value: Any, base: type, title: str, page: str) -> None:
    """Check that a plug-in is a complete subclass of a base class.

    Args:
        value: The object that a reference or an entry point leads to.
        base: The abstract base class of the kind.
        title: The start of error messages, such as "store 'cassandra'".
        page: The page of the documentation that shows how to write such a class.

    Raises:
        ConfigError: The object is no subclass, lacks a method, or has a method that does not accept the arguments
            of the base class.
    """
    problems = _find_class_problems(value, base)
    if problems:
        raise ConfigError(f"{title} ({_locate_source(value)}): {'; '.join(problems)}; see {page}")


def check_spec(value: Any, base: type, title: str, page: str, contract: Mapping[str, Any]) -> None:
    """Check that a plug-in is a complete spec of its kind.

    Args:
        value: The object that a reference or an entry point leads to.
        base: The class of the specs of the kind. Its abstract methods must be overridden.
        title: The start of error messages, with the file of the plug-in.
        page: The page of the documentation that shows how to write such a spec.
        contract: By attribute of the spec, the protocol or base class that the attribute, a class, must implement, or the
            function whose arguments the attribute, a function, must accept. An attribute that is a dotted path must name
            an existing object, which is not imported.

    Raises:
        ConfigError: The object is of another type, lacks a method, or has a method that does not accept its arguments.
    """
    if isinstance(value, base):
        problems = _find_method_problems(type(value), base)
        for name, declared in contract.items():
            problems += (
                _find_member_problems(getattr(value, name), declared, name) if hasattr(value, name) else []
            )
    else:
        problems = [f"expected an object of type {base.__name__}, got {value!r}"]
    if problems:
        raise ConfigError(f"{title}: {'; '.join(problems)}; see {page}")


def find_entry_point(name: str, group: str, title: str, shipped: Collection[str]) -> EntryPoint | None:
    """Return the entry point with a name, or None if no installed package has one.

    Args:
        name: The name of the plug-in.
        group: The entry point group.
        title: The start of error messages.
        shipped: The names of the shipped plug-ins.

    Raises:
        ConfigError: The name is already taken by a shipped plug-in or by a second package.
    """
    points = list(list_entry_points(group, name))
    if points and (name in shipped or len(points) > 1):
        owner = "Nonet ships" if name in shipped else f"{points[1].value} has"
        raise ConfigError(f"{title} ({points[0].value}): the name is taken, {owner} it; choose another name")
    return points[0] if points else None


def list_entry_points(group: str, name: str | None = None) -> EntryPoints:
    """Return the entry points of a group, or only those with a name; all groups are read once per process."""
    points = _read_entry_points().select(group=group)
    return points if name is None else points.select(name=name)


@cache
def _read_entry_points() -> EntryPoints:
    """Read the entry points of all groups from the metadata of installed packages."""
    return cast("EntryPoints", entry_points())


def _find_class_problems(value: Any, base: type) -> list[str]:
    """Return what is wrong with a plug-in class, one phrase each; empty if nothing is."""
    if not isinstance(value, type) or not issubclass(value, base):
        return [f"expected a subclass of {base.__name__}, got {value!r}"]
    return _find_method_problems(value, base)


def _find_member_problems(member: Any, declared: Any, name: str) -> list[str]:
    """Return what is wrong with an attribute of a spec, one phrase each; empty if nothing is.

    Args:
        member: The value of the attribute: a class, a function, or the dotted path of one.
        declared: The protocol, base class or function of the contract.
        name: The name of the attribute.
    """
    if isinstance(member, str) and member:
        problem = _find_path_problem(member)
        return [f"{name} is {member!r}: {problem}"] if problem else []
    if not isinstance(declared, type):  # the contract is a function
        if not callable(member):
            return [f"{name} is {member!r}, which is not a function"]
        problem = _find_call_problem(member, declared, name)
        return [problem] if problem else []
    if not isinstance(member, type):  # such as None or "" for the default
        return []
    is_protocol = getattr(declared, "_is_protocol", False)
    return _find_method_problems(member, declared) if is_protocol else _find_class_problems(member, declared)


def _find_path_problem(path: str) -> str:
    """Describe why `package.module:Name` names nothing; empty if it does, or if only an import could tell."""
    module, _, attribute = path.partition(":")
    if not attribute:
        return f"it does not name an object; write {module}:Name"
    try:
        module_spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        module_spec = None
    if module_spec is None:
        return f"there is no module {module}"
    if not (module_spec.origin or "").endswith(".py") or module_spec.submodule_search_locations is not None:
        return ""  # compiled, or a package whose names may be loaded on first use
    tree = ast.parse(Path(module_spec.origin or "").read_bytes())
    names = set(_list_top_names(tree.body))
    may_exist = attribute in names or "*" in names or "__getattr__" in names
    return "" if may_exist else f"there is no {attribute} in {module}{suggest_inline(attribute, names)}"


def _list_top_names(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements of a module bind, but not those inside its functions and classes."""
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            yield from [node.id] if isinstance(node.ctx, ast.Store) else []
        else:
            yield from _list_top_names(ast.iter_child_nodes(node))


def _find_method_problems(value: type, base: type) -> list[str]:
    """Return which methods of a base class or protocol a class lacks; if it has all, those with the wrong arguments."""
    declared_names = {name for part in base.__mro__ if part is not object for name in vars(part)}
    methods = [name for name in sorted(declared_names) if not name.startswith("__")]
    missing = sorted(getattr(value, "__abstractmethods__", ())) or [
        name for name in methods if _is_required(base, name) and not _is_implemented(value, name)
    ]
    if missing:
        return [f"class {value.__name__} has no {' and no '.join(missing)}"]
    return [problem for name in methods if (problem := _find_signature_problem(value, base, name))]


def _is_required(base: type, name: str) -> bool:
    """Return whether `name` is a method of a base class or protocol that a class must have."""
    declared = inspect.getattr_static(base, name)
    required = getattr(base, "_is_protocol", False) or getattr(declared, "__isabstractmethod__", False)
    return inspect.isfunction(declared) and required and not hasattr(declared, "__nonet_optional__")


def _is_implemented(value: type, name: str) -> bool:
    """Return whether a class has a method of this name that is not abstract."""
    method = getattr(value, name, None)
    return callable(method) and not getattr(method, "__isabstractmethod__", False)


def _find_signature_problem(value: type, base: type, name: str) -> str:
    """Describe why a method cannot be called as the base class declares; empty if it can."""
    declared, implemented = getattr(base, name), getattr(value, name, None)
    if implemented is None or implemented is declared or not inspect.isfunction(declared):
        return ""
    if not inspect.isfunction(inspect.getattr_static(value, name)):
        return ""  # a static or class method, or an object that is called
    return _find_call_problem(implemented, declared, f"{value.__name__}.{name}")


def _find_call_problem(implemented: Callable[..., Any], declared: Callable[..., Any], title: str) -> str:
    """Describe why `implemented` cannot be called with the arguments of `declared`; empty if it can."""
    signature, implemented_signature = inspect.signature(declared), inspect.signature(implemented)
    expected = signature.parameters.values()
    by_keyword = [p.name for p in expected if p.kind is p.KEYWORD_ONLY]
    by_position = [p.name for p in expected if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_KEYWORD for p in expected):
        # `declared` takes **kwargs: callers pass every further argument that `implemented` requires, by keyword.
        required = [p for p in implemented_signature.parameters.values() if p.default is p.empty]
        by_keyword += [p.name for p in required if p.kind < p.VAR_POSITIONAL][len(by_position) :]
        by_keyword += [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    try:
        implemented_signature.bind(*(None for _ in by_position), **dict.fromkeys(by_keyword))
    except (TypeError, ValueError):
        return f"{title} does not accept {signature}"
    return ""


def _locate_source(value: Any) -> str:
    """Return the file that defines an object, or its module if there is no file."""
    try:
        return inspect.getsourcefile(value) or value.__module__
    except TypeError:
        return type(value).__module__
