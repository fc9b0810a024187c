"""Scenarios with one wrong value: every key of a scenario and of the options of shipped kinds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import deepcopy
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from nonet.controller.scenario import Scenario
from nonet.controller.scenario.stage import STAGES, StageOptions
from nonet.replaceable import Replaceable
from nonet.rl.rewards.api import SHIPPED, find_reward

WRONG_VALUES = (-7, "no such thing")
# What a part needs beside the key that is wrong, by the path of the part, with its kind if that matters.
_NEEDED: dict[str, dict[str, Any]] = {
    "data.events": {"compress": "1h"},
    "data.labels": {"path": "interactions.parquet", "within": "1d", "name": "late"},
    "data.join.item": {"use": "prices", "columns": ["price"]},
    "data.graph.near": {"edges": "item-item"},
    "data.sequences": {"use": "sequences.store"},
    "data.split:time": {"test": "1970-01-01T12:00:00Z"},
    "data.source:parquet": {"path": "/no/rows.parquet"},
    "tokenizer:file": {"path": "sids.parquet"},
    "tokenizer.vectors": {"use": "hf", "path": "words", "columns": ["title"]},
    "tokenizer.vectors.0": {"use": "hf", "path": "words", "columns": ["title"]},
    "model:hf": {"path": "none"},  # so that values of the right type need no transformers
    "roles.trainer.workers": {"min": 1, "max": 1},
    "sparse.tables.item.evict": {"ttl_steps": 10},
    "init": {"from": "last"},
    "stages.align": {"use": "align", "epochs": 1},
    "stages.rl.rewards.own.weight": {"start": 0.0, "end": 1.0, "steps": 2},
    "stages.rl.between.0": {"use": "rewards/own.py:own"},
    "stages.rl.scenes": {"column": "event", "of": {"view": {}}},
    "evaluate.baselines.0": {"use": "popularity"},
} | {f"stages.{name}.lr": {"peak": 1e-3} for name in ("align", "pretrain", "rl")}
_NAMES = {
    "tables": "item",
    "pools": "gpu",
    "roles": "trainer",
    "join": "item",
    "graph": "near",
    "rewards": "own",
    "of": "view",
    "tracking": "mlflow",
}
_STAGES = {"<align>": "align", "<supervised>": "pretrain", "<reinforced>": "rl"}


def list_wrong_documents(document: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (key, wrong value, copy of the document that has it) for every key and wrong value.

    Args:
        document: A valid scenario with the stages pretrain and rl, which has a reward `own`.
    """
    for path in dict.fromkeys(_walk_keys(Scenario, ())):
        for value in WRONG_VALUES:
            yield ".".join(path), value, _put_value(document, path, value)
    for name in SHIPPED:
        target = find_reward(name)
        for option in inspect.signature(target).parameters.values():
            if isinstance(target, type) or option.kind is option.KEYWORD_ONLY:
                for value in WRONG_VALUES:
                    changed = deepcopy(document)
                    changed["stages"]["rl"]["rewards"] = {name: {option.name: value}}
                    yield f"stages.*.rewards.<{name}>.{option.name}", value, changed


def _put_value(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a document with a value at a path, and with what the parts on the way need."""
    changed = deepcopy(document)
    part, place = changed, ""
    for segment in path[:-1]:
        if segment.startswith("<"):
            if (
                not place.startswith("stages.") or place.count(".") > 1
            ):  # the kind of a stage follows from its keys
                part.clear()
                part |= {
                    "use": segment.strip("<>"),
                    **deepcopy(_NEEDED.get(f"{place}:{segment.strip('<>')}", {})),
                }
            continue
        is_entry = segment == "#"
        if segment == "*":
            segment = _NAMES.get(place.rpartition(".")[2], "")
            segment = segment or _STAGES[path[path.index("stages") + 2]]
        place = f"{place}.{'0' if is_entry else segment}".strip(".")
        if is_entry:
            continue
        child = part.get(segment)
        if not isinstance(child, dict):
            child = deepcopy(_NEEDED.get(place) or _NEEDED.get(f"{place}.0") or {})
            follows = path[path.index(segment) + 1] if segment in path[:-1] else ""
            part[segment] = [child] if follows == "#" else child
        part = child
    part[path[-1]] = value
    return changed


def _walk_keys(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of a model, `*` for any name, `#` for an entry of a list, `<kind>` before a kind's options."""
    if model is StageOptions:
        for kind in STAGES.list_names():
            yield from _walk_keys(STAGES.get(kind).options, (*path, f"<{kind}>"))
        return
    for name, field in model.model_fields.items():
        key = (*path, field.alias or name)
        yield key
        if path and path[0] == "stages" and name == "roles":
            continue  # they have the keys of the run's roles
        for containers, inner in _find_models(field.annotation):
            yield from _walk_keys(inner, key + containers)
    if issubclass(model, Replaceable):
        walked: set[tuple[type, str]] = (
            set()
        )  # kinds share options of a base class, which are tried with one of them
        for kind, options in model.list_option_classes().items():
            for key in _walk_keys(options, (*path, f"<{kind}>")):
                name = key[len(path) + 1]
                origin = next(
                    base for base in options.__mro__ if name in vars(base).get("__annotations__", ())
                )
                if (origin, ".".join(key[len(path) + 1 :])) not in walked:
                    walked.add((origin, ".".join(key[len(path) + 1 :])))
                    yield key


def _find_models(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield (containers, model) for every model in an annotation, such as (("*",), Table) for dict[str, Table]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield (), annotation
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, dict):
        arguments = arguments[:1] if origin is Annotated else arguments[1:]
    container = ("*",) if origin is dict else ("#",) if origin is list else ()
    for argument in arguments:
        for inner_containers, model in _find_models(argument):
            yield container + inner_containers, model
