"""One-line messages for an invalid scenario: the path of the key, the value that was given, and what is allowed.

The paths of pydantic's problems (`loc`) contain the names of union members, which no user wrote. `_list_keys_in_document`
removes them, and the message is about the union member that the user most likely intended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from nonet.controller.scenario.document import is_hidden
from nonet.controller.scenario.stage import StageOptions, find_kind
from nonet.plugins import PluginFiles
from nonet.replaceable import Replaceable
from nonet.suggest import suggest_inline
from nonet.yaml import is_map


def explain(error: ValidationError, model: type[BaseModel], document: Any, files: PluginFiles) -> str:
    """Describe one problem of an invalid scenario in one line, which also counts the other problems.

    Args:
        error: The error that pydantic raised.
        model: The option class of the whole document.
        document: The document as it was read.
        files: The location of the user's own files, for stage kinds that a file defines.
    """
    problems = error.errors(include_url=False)
    problem = _choose_problem(problems, document)
    loc = _list_keys_in_document(problem["loc"], document, is_missing=problem["type"] == "missing")
    path = ".".join(map(str, loc))
    problem_type, value = problem["type"], _HiddenValue() if is_hidden(loc) else problem.get("input")
    if problem_type == "extra_forbidden":
        known_keys = _list_keys(loc[:-1], model, document, files)
        if loc[-1] in known_keys:
            uses = _list_uses_with_key(str(loc[-1]), _find_class(loc[:-1], model, document, files))
            text = f"is a key of another `use`{': ' if uses else ''}{', '.join(uses)}"
        else:
            text = f"unknown key{suggest_inline(str(loc[-1]), known_keys)}" + (
                f"; known keys: {', '.join(known_keys)}" if known_keys else ""
            )
    elif problem_type == "missing":
        text = "is required and missing"
    elif problem_type == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
    elif problem_type in ("model_type", "model_attributes_type"):
        keys_text = ", ".join(_list_keys(loc, model, document, files))
        text = f"wanted a map, got {'nothing' if value is None else repr(value)}; its keys: {keys_text}"
    elif problem_type == "dict_type":
        text = f"wanted a map of names, got {'nothing' if value is None else repr(value)}"
    else:
        message = problem["msg"][:1].lower() + problem["msg"][1:]
        text = f"{message}, got {value!r}"
    # The members of a union report a problem each; they have the same parent and count as one.
    parent = problem["loc"][:-1]
    other_paths = {str(other["loc"][: len(parent)]) for other in problems[1:]} - {str(parent)}
    more = f" (and {len(other_paths)} more)" if other_paths else ""
    return f"{path}: {text}{more}" if path else f"{text}{more}"


class _HiddenValue:
    """Stands for a value that must not be printed."""

    def __repr__(self) -> str:
        return "a value that is not shown"


def _choose_problem(problems: Sequence[Any], document: Any) -> Any:
    """Return the problem to report.

    This is the first problem. If a map or list was given for a union such as `float | Schedule`, it is the most deeply nested
    problem inside that map or list.
    """
    first = problems[0]
    loc = first["loc"]
    # True if the last part of the path is the name of a union member and no key of the document.
    is_in_union = _list_keys_in_document(loc, document) == _list_keys_in_document(loc[:-1], document)
    if not isinstance(first.get("input"), dict | list) or not loc or not is_in_union:
        return first
    # A problem such as "dict_type" only says that the value does not fit another member of the union, so it is skipped.
    inner_problems = [
        problem
        for problem in problems
        if problem["loc"][: len(loc) - 1] == loc[:-1] and not problem["type"].endswith("_type")
    ]
    return max(inner_problems, key=lambda problem: len(problem["loc"]), default=first)


def _list_keys_in_document(loc: Sequence[Any], document: Any, *, is_missing: bool = False) -> list[Any]:
    """Return the keys and list indices of a pydantic path without the parts that no user wrote.

    Parts that are not in the document are names of union members, which pydantic adds. The exceptions are a missing key, and
    `use` where a word stands for `{use: word}`.

    Args:
        loc: The path that pydantic reports.
        document: The document as it was read.
        is_missing: Whether the last part is a required key that the document lacks.
    """
    keys: list[Any] = []
    value: Any = document
    for index, part in enumerate(loc):
        is_last = index == len(loc) - 1
        if is_map(value) and part in value:
            keys.append(part)
            value = value[part]
        elif isinstance(part, int):
            keys.append(part)
            items = cast("list[Any]", value) if isinstance(value, list) else []
            value = items[part] if part < len(items) else None
        elif (is_missing and is_last) or (part == "use" and isinstance(value, str)):
            keys.append(part)
    return keys


def _find_class(
    loc: list[Any], model: type[BaseModel], document: Any, files: PluginFiles
) -> type[BaseModel] | None:
    """Return the option class of the value at a path of a document; None if it has no class of its own."""
    expects_map_key = False  # whether the next part is a key of a `dict` field, which the user chose
    for part in loc:
        if isinstance(part, int):  # an index into a list has no class
            continue
        if expects_map_key:
            expects_map_key = False
            if model is StageOptions:
                model = find_kind(document["stages"][part], files).options
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        field_class, expects_map_key = _find_model(annotation), get_origin(annotation) is dict
        if field_class is None:
            return None
        model = field_class
    return model


def _list_uses_with_key(key: str, model: type[BaseModel] | None) -> list[str]:
    """Return the values of `use`, sorted, for which an option class has a key."""
    options_by_use = (
        model.list_option_classes() if model is not None and issubclass(model, Replaceable) else {}
    )
    return sorted(name for name, options in options_by_use.items() if key in options.model_fields)


def _list_keys(loc: list[Any], model: type[BaseModel], document: Any, files: PluginFiles) -> list[str]:
    """Return the keys, sorted, that a document may have at a path, including those of all values of `use`."""
    model_class = _find_class(loc, model, document, files)
    if model_class is None:
        return []
    names = [field.alias or name for name, field in model_class.model_fields.items() if name != "use"]
    options_by_use = model_class.list_option_classes() if issubclass(model_class, Replaceable) else {}
    return sorted(
        {
            *names,
            *(key for options in options_by_use.values() for key in options.model_fields),
            *(["use"] if options_by_use else []),
        }
    )


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """Return the first option class in an annotation such as `dict[str, Table]` or `Schedule | float`; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_find_model, get_args(annotation))), None)
