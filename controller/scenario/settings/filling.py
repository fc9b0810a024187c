"""Fill a scenario's document before it is checked: what it leaves out comes from the data, what it says stays.

The document is plain data, as YAML has it. Afterwards `settings` holds a reason for every derived key instead of the word
`data`: a run stores it so, and a resume derives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

from nonet.controller.scenario.settings.rule import (
    Setting,
    choose_keep,
    choose_rest,
    choose_split,
)
from nonet.errors import ConfigError, DataError
from nonet.samples.profiles import DataProfile, read_profile
from nonet.samples.tables import TableFormat

Document = dict[str, Any]
Put = Callable[[Document, str, Any], None]


class Stages(NamedTuple):
    """What a rule asks of a scenario's stages: the names of those that learn next events, and whether one rolls out."""

    supervised: Sequence[str]
    rolls_out: bool


def fill(document: Document, folder: Path, stages: Stages, put: Put) -> dict[str, str]:
    """Put every derived key that is not there into `document`; path -> reason of each.

    Raises DataError where the tables cannot be read, or hold nothing to learn from.
    """
    data: Document = document["data"]
    keep = _part(data, "keep")
    profile = profile_of(data, folder, keep or {})
    least = 3 if _part(data, "split") is None else 2
    _check(profile, least)
    reasons: dict[str, str] = {}

    def add(setting: Setting) -> None:
        if not _says(document, setting.path):
            put(document, setting.path, setting.value)
            reasons[setting.path] = setting.reason

    if keep is None:
        setting = choose_keep(profile)
        add(setting)
        profile = profile_of(data, folder, setting.value)
        _check(profile, least)
    split = _part(data, "split")
    if split is None:
        setting = choose_split(profile, stages.rolls_out)
        add(setting)
        split = cast("Document", setting.value)
    evaluate = _part(document, "evaluate") or {}
    all_rows = _holds_all_items(_part(document, "sparse") or {})
    for setting in choose_rest(profile, split, stages.supervised, evaluate.get("metrics"), all_rows):
        add(setting)
    return reasons


def _holds_all_items(sparse: Document) -> bool:
    """Whether the tables that a scenario names have a row of every item; one that names none leaves them to the rule."""
    tables = _part(sparse, "tables")
    if tables is None:
        return True
    named = {name: _part(tables, name) or {} for name in tables}
    of_items = [table for name, table in named.items() if "item" in (table.get("features") or [name])]
    return any(not {"admit", "evict", "budget"} & set(table) for table in of_items)


def take_from(document: Document, stored: Mapping[str, Any], put: Put) -> dict[str, str]:
    """As `fill`, with the values that a run's stored document has."""
    reasons: dict[str, str] = {}
    for path, reason in stored["settings"].items():
        if not _says(document, path):
            put(document, path, _at(stored, path))
            reasons[path] = reason
    return reasons


def profile_of(data: Mapping[str, Any], folder: Path, keep: Mapping[str, int]) -> DataProfile:
    """The profile of what a document's `data` names, beside the scenario in `folder`."""
    return read_profile(
        _beside(folder, data["interactions"]),
        _beside(folder, data["items"]) if data.get("items") else None,
        TableFormat.from_options(data.get("columns"), data.get("missing")),
        where=data.get("where"),
        keep=keep,
    )


def _check(profile: DataProfile, least: int) -> None:
    """Raise DataError where nothing can be learnt and tested; least: events that a user needs for that."""
    most = profile.get_length_quantile(1.0)
    if most < least:
        each = "one event" if most == 1 else f"{most} events at most"
        raise DataError(
            f"settings: data: each of the {profile.users:,} users has {each}, and one must have {least}, to learn from and to "
            "test. Check data.columns.user: does it name users or sessions, or single events?"
        )
    if profile.items < 2:
        raise DataError(
            f"settings: data: all {profile.events:,} events are of one item: there is nothing to recommend. Check "
            "data.columns.item"
        )


def _says(document: Mapping[str, Any], path: str) -> bool:
    """Whether the document has a value at `a.b.c`, or on the way something that has no keys."""
    *parents, last = path.split(".")
    place: Any = document
    for part in parents:
        place = place.get(part)
        if place is None:
            return False
        if not _is_map(place):
            return True
    if last == "epochs" and {"tokens", "steps"} & set(place):
        return True
    return place.get(last) is not None


def _at(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        value = value[part]
    return value


def _part(document: Mapping[str, Any], name: str) -> Document | None:
    value = document.get(name)
    if value is not None and not _is_map(value):
        return {"use": value} if isinstance(value, str) else {}
    return value


def _is_map(value: object) -> TypeGuard[Document]:
    return isinstance(value, dict)


def _beside(folder: Path, path: Any) -> str:
    if not isinstance(path, str):
        raise ConfigError(f"data: wanted a path, got {path!r}")
    return path if ":" in path or Path(path).is_absolute() else str(folder / path)
