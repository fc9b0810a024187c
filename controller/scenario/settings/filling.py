"""Completion of a scenario's document with keys that a rule derives from the data (`settings: data`).

The document is plain data, as in YAML, and is completed before it is validated. Keys that the document already has are kept.
In the completed document, `settings` maps the path of each derived key to the reason for its value. A run stores the
completed document, so a resume derives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from nonet.samples.sequences import Compress
from nonet.samples.tables import TableFormat

Document = dict[str, Any]
Put = Callable[[Document, str, Any], None]  # sets the key at a path of a document to a value


class StageSummary(NamedTuple):
    """The facts about a scenario's stages from which `settings` are derived.

    Attributes:
        supervised: Names of the supervised stages, in order.
        rolls_out: Whether any stage uses rollouts.
    """

    supervised: Sequence[str]
    rolls_out: bool


def fill_settings(document: Document, folder: Path, stages: StageSummary, put: Put) -> dict[str, str]:
    """Add every derived key that the document lacks.

    Args:
        document: The document, changed in place.
        folder: The folder of the scenario, to which paths are relative.
        stages: The stages of the scenario.
        put: Sets the key at a path of the document.

    Returns:
        The reason for each derived key, by path.

    Raises:
        DataError: The tables cannot be read, or contain nothing to learn from.
    """
    data: Document = document["data"]
    keep = _get_part(data, "keep")
    profile = _read_data_profile(data, folder, keep or {})
    # The derived split tests and validates on at least one event each, so that a user needs a third one to train on.
    min_events = 3 if _get_part(data, "split") is None else 2
    _check_profile(profile, min_events)
    reasons: dict[str, str] = {}

    def add(setting: Setting) -> None:
        if not _has_value(document, setting.path):
            put(document, setting.path, setting.value)
            reasons[setting.path] = setting.reason

    if keep is None:
        memory = _get_part(_get_part(document, "model") or {}, "memory")
        has_cold_items = isinstance(memory, Mapping) and "cold" in (memory.get("voters") or ())
        setting = choose_keep(profile, has_cold_items)
        add(setting)
        profile = _read_data_profile(data, folder, setting.value)
        _check_profile(profile, min_events)
    split = _get_part(data, "split")
    if split is None:
        setting = choose_split(profile, stages.rolls_out)
        add(setting)
        split = cast("Document", setting.value)
    evaluate = _get_part(document, "evaluate") or {}
    all_rows = _has_all_items(_get_part(document, "sparse") or {})
    kept = _get_part(_get_part(document, "checkpoint") or {}, "keep") or {}
    names_metric = bool(kept.get("best"))  # for all stages
    vectors = list(_get_part(data, "vectors") or {})
    for setting in choose_rest(profile, split, stages.supervised, evaluate.get("metrics"), all_rows, vectors):
        if not (names_metric and setting.path.endswith(".stop.by")):
            add(setting)
    return reasons


def _has_all_items(sparse: Document) -> bool:
    """Return whether some table keeps a row for every item; True if the scenario names no tables.

    Args:
        sparse: The keys of `sparse`.
    """
    tables = _get_part(sparse, "tables")
    if tables is None:
        return True
    options_by_table = {name: _get_part(tables, name) or {} for name in tables}
    item_tables = [
        options for name, options in options_by_table.items() if "item" in (options.get("features") or [name])
    ]
    return any(not {"admit", "evict", "budget"} & set(options) for options in item_tables)


def take_stored_settings(document: Document, stored: Mapping[str, Any], put: Put) -> dict[str, str]:
    """Add derived keys as `fill_settings` does, with the values in the document that a run stored.

    Args:
        document: The document, changed in place.
        stored: The document that the run stored.
        put: Sets the key at a path of the document.

    Returns:
        The reason for each derived key, by path.
    """
    reasons: dict[str, str] = {}
    for path, reason in stored["settings"].items():
        is_of_other_stage = path.startswith("stages.") and path.split(".")[1] not in document["stages"]
        if not is_of_other_stage and not _has_value(document, path):
            put(document, path, _get_value(stored, path))
            reasons[path] = reason
    return reasons


def copy_stored_values(document: Document, stored: Mapping[str, Any], paths: Iterable[str], put: Put) -> None:
    """Replace the values at some paths of a document by those of the document that a run stored, where it has one."""
    for path in paths:
        value: Any = stored
        for part in path.split("."):
            value = value.get(part) if _is_map(value) else None
        if value is not None:
            put(document, path, value)


def _read_data_profile(data: Mapping[str, Any], folder: Path, keep: Mapping[str, int]) -> DataProfile:
    """Read the tables that a document's `data` names, and return their profile.

    Args:
        data: The keys of `data`.
        folder: The folder of the scenario, to which paths are relative.
        keep: The keys of `data.keep`.
    """
    return read_profile(
        _resolve_path(folder, data["interactions"]),
        _resolve_path(folder, data["items"]) if data.get("items") else None,
        TableFormat.from_options(data.get("columns"), data.get("missing")),
        where=data.get("where"),
        drop_unknown_items=data.get("unknown_items") == "drop",
        keep=keep,
        compress=_parse_compression(data),
    )


def _parse_compression(data: Mapping[str, Any]) -> Compress | None:
    """Return `data.events`; None without compression, or with a value that the validation refuses."""
    try:
        return Compress.model_validate(data.get("events"))
    except ValueError:
        return None


def _check_profile(profile: DataProfile, min_events: int) -> None:
    """Raise DataError unless the data have two items, and a user with at least `min_events` events to train and test on."""
    most_events = profile.get_length_quantile(1.0)
    if most_events < min_events:
        length_text = "one event" if most_events == 1 else f"{most_events} events at most"
        raise DataError(
            f"settings: data: each of the {profile.users:,} users has {length_text}, and at least one must have {min_events} to "
            "train and test. Check data.columns.user: does it name users or sessions, or single events?"
        )
    if profile.items < 2:
        raise DataError(
            f"settings: data: all {profile.events:,} events are of one item: there is nothing to recommend. Check "
            "data.columns.item"
        )


def _has_value(document: Mapping[str, Any], path: str) -> bool:
    """Return whether a path of a document needs no derived value.

    That is so if it has a value, or if a prefix of it has a value that is not a map.

    `epochs` also counts as present if the stage has `tokens` or `steps`, because a stage has only one of the three.
    """
    *parents, last = path.split(".")
    value: Any = document
    for part in parents:
        value = value.get(part)
        if value is None:
            return False
        if not _is_map(value):
            return True
    if last == "epochs" and {"tokens", "steps"} & set(value):
        return True
    return value.get(last) is not None


def _get_value(document: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of a document."""
    value: Any = document
    for part in path.split("."):
        value = value[part]
    return value


def _get_part(document: Mapping[str, Any], name: str) -> Document | None:
    """Return the map at a key, or None if the key is missing; a word becomes `{use: word}`, and any other value `{}`."""
    value = document.get(name)
    if value is not None and not _is_map(value):
        return {"use": value} if isinstance(value, str) else {}
    return value


def _is_map(value: object) -> TypeGuard[Document]:
    return isinstance(value, dict)


def _resolve_path(folder: Path, path: Any) -> str:
    """Resolve a path that is relative to the scenario's folder; absolute paths and URIs are returned as they are."""
    if not isinstance(path, str):
        raise ConfigError(f"data: wanted a path, got {path!r}")
    return path if ":" in path or Path(path).is_absolute() else str(folder / path)
