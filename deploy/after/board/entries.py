"""The entries of a board: a data set with one protocol, or a scenario with its own.

A protocol is a scenario without tables. The scenario of an entry is a file in the board's folder, so `nonet run` repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import field_validator

from nonet import yaml
from nonet.atomic import refuse_damage, write_whole
from nonet.controller.scenario import find_scenario, list_shipped_scenarios
from nonet.controller.setup import make_data_setup
from nonet.deploy.new import find_source, make_data_section
from nonet.deploy.run import api
from nonet.errors import ConfigError, DataError
from nonet.models.baselines.kinds import BASELINES
from nonet.options import StrictModel
from nonet.samples.profiles import DataProfile, read_profile
from nonet.samples.sequences import ALLOW, LIMIT
from nonet.samples.tables import TableFormat, read_interactions, read_items
from nonet.suggest import join_names, suggest_sentence

OWN = "own"  # the protocol of entries that are scenarios
PROTOCOLS = {
    "last": "Each user's last event is tested and the one before it validates. All items are ranked but those that the user "
    "has seen, for all users.",
    "time": "The newest tenth of all events is tested, and the tenth before it validates. All items are ranked, after each "
    "event of a user; those that the user has seen are left out where the data have no repeats.",
    "sessions": "Each session's last event is tested and the one before it validates. All items are ranked, and seen ones too.",
    OWN: "The scenario's own.",
}
METRICS = [*(f"{name}@{k}" for name in ("recall", "ndcg") for k in (5, 10, 20)), "mrr@20"]
_BASELINES: tuple[dict[str, Any], ...] = (
    *(
        {"use": name}
        for name in (
            *("popularity", "recent_popularity", "transition_counter", "attribute_counter"),
            *("item_knn", "v_sknn", "ease", "ials"),
        )
    ),
    {"use": "sasrec", "trials": 8, "epochs": 40},
)
_WIDTH = 20  # of lists, for metrics at 20
_TIME_SHARES = (0.8, 0.9)  # of the events, before validation and before the test
_MAX_TEST_SHARE = 0.3  # of the events, which equal times may add to the last tenth
_DATA = "-data"  # the end of the names of folders of imported tables
_NAME = re.compile(r"[A-Za-z0-9][\w+-]*")


def _can_name_files(name: str) -> bool:
    """Return whether a name can be a part of the names of an entry's files, and is not that of imported tables."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(_DATA)


class BoardEntry(StrictModel):
    """One entry of a board.

    Attributes:
        name: The name of the data set or of the scenario.
        protocol: A key of `PROTOCOLS`.
        source: The absolute path of the data set, or the path or name of the scenario that the entry's one extends.
        baselines: The baselines that it is compared with, as in `evaluate.baselines`.
    """

    name: str
    protocol: str
    source: str
    baselines: list[dict[str, Any]]

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        """Check that the name can be a part of file names, and is not that of imported tables."""
        if not _can_name_files(name):
            raise ValueError(
                f"{name!r} cannot be a part of file names here; use letters, digits and -, and another end than {_DATA}"
            )
        return name

    @field_validator("protocol")
    @classmethod
    def _check_protocol(cls, protocol: str) -> str:
        """Check that the protocol is known."""
        if protocol not in PROTOCOLS:
            raise ValueError(f"no such protocol {protocol!r}")
        return protocol

    @property
    def key(self) -> str:
        """The name of the entry's files in the board's folder."""
        return self.name if self.protocol == OWN else f"{self.name}-{self.protocol}"

    def get_scenario(self, folder: Path) -> str:
        """Return the path of the entry's scenario, in the board's folder."""
        return str(folder / f"{self.key}.yaml")

    def get_recipe(self, folder: Path) -> tuple[str, list[str]]:
        """Return the path or name of the scenario to run, and changes of its keys.

        A scenario of the user runs from its own file, with the metrics and baselines of the board as changes.
        """
        if self.protocol != OWN:
            return self.get_scenario(folder), []
        values = make_evaluate_options(self.baselines)
        return self.source, [f"evaluate.{key}={json.dumps(value)}" for key, value in values.items()]


def parse_entries(
    data: Sequence[str], protocols: Sequence[str], folder: Path, known: Sequence[BoardEntry]
) -> tuple[list[BoardEntry], list[str]]:
    """Read what --data and --protocol name, and import data sets that the board does not have yet.

    Args:
        data: Data sets and scenarios, each as [NAME=]PATH, or several with commas between.
        protocols: Protocols of data sets; empty to choose one for each by its repeats.
        folder: The board's folder.
        known: The entries that the board has already.

    Returns:
        All entries, whose scenarios exist, and notes about new data.

    Raises:
        ConfigError: A name, a path or a protocol is wrong, or the data lack what the protocol needs.
        DataError: The tables of a data set are wrong.
    """
    choices = [name for name in PROTOCOLS if name != OWN]
    for protocol in protocols:
        if protocol not in choices:
            raise ConfigError(
                f"--protocol {protocol}: no such protocol; there are {join_names(choices)}."
                f"{suggest_sentence(protocol, choices)}"
            )
    entries, notes = list(known), []
    for text in (part for option in data for part in option.split(",") if part):
        name, path = _split_source(text)
        is_scenario = path in list_shipped_scenarios() or Path(path).suffix in (".yaml", ".yml")
        if not is_scenario:
            source = str(Path(path).absolute())
        else:
            source = path if path in list_shipped_scenarios() else str(find_scenario(path).absolute())
        same_name = [entry for entry in entries if entry.name == name]
        if others := [entry.source for entry in same_name if entry.source != source]:
            raise ConfigError(
                f"--data {text}: {name} is the name of {others[0]} in this board; write OTHER={path}"
            )
        known_protocols = [entry.protocol for entry in same_name]
        wanted = [OWN] if is_scenario else protocols or known_protocols
        if wanted and set(wanted) <= set(known_protocols):
            continue
        if is_scenario:
            scenario_file = api.scenario(source)
            data_setup = make_data_setup(scenario_file.scenario, scenario_file.folder).options
            table_format = TableFormat.from_options(data_setup.columns, data_setup.missing)
            profile = read_profile(data_setup.interactions, data_setup.items, table_format)
            baselines = _select_baselines(name, profile, data_setup.items, table_format, notes)
            entry = BoardEntry(name=name, protocol=OWN, source=source, baselines=baselines)
            _check_key(entry, entries)
            _write_scenario(entry, {"extends": source, "evaluate": {}}, folder)
            entries.append(entry)
        else:
            made = _import_source(name, Path(source), wanted, same_name, folder, notes)
            for entry, document in made:
                _check_key(entry, entries)
                _write_scenario(entry, document, folder)
                entries.append(entry)
    return entries, notes


def _split_source(text: str) -> tuple[str, str]:
    """Split [NAME=]PATH; the name is by default that of the file or folder.

    Raises:
        ConfigError: The name cannot be a part of file names.
    """
    name, separator, path = text.partition("=")
    if not separator or Path(text).exists():
        name, path = Path(text).absolute().name.partition(".")[0], text
    if not _can_name_files(name):
        raise ConfigError(
            f"--data {text}: {name!r} cannot be a part of file names; write NAME=PATH with letters, digits and - in NAME, and "
            f"another end than {_DATA}"
        )
    return name, path


def _check_key(entry: BoardEntry, entries: Sequence[BoardEntry]) -> None:
    """Raise ConfigError if another entry has the same files."""
    if others := [other for other in entries if other.key == entry.key]:
        raise ConfigError(
            f"--data {entry.name}: {entry.key} is the protocol {others[0].protocol} of {others[0].name} in this board; write "
            f"OTHER={entry.source}"
        )


def _import_source(
    name: str, path: Path, wanted: Sequence[str], known: Sequence[BoardEntry], folder: Path, notes: list[str]
) -> list[tuple[BoardEntry, dict[str, Any]]]:
    """Import a data set, and make the scenarios of its protocols that the board does not have yet.

    Args:
        name: The name of the data set.
        path: Its path.
        wanted: The protocols; empty to choose one.
        known: The entries of the data set that the board has already, whose tables are not imported again: runs read them.
        folder: The board's folder.
        notes: A list to which notes about the data are appended.

    Returns:
        The new entries with their scenarios.
    """
    table_format = TableFormat.from_options({}, None)
    if known:
        file = Path(known[0].get_scenario(folder))
        with refuse_damage(file):
            data = yaml.read(file)["data"]
            section = {key: data[key] for key in ("interactions", "items", "columns") if key in data}
    else:
        try:
            source = find_source(path, None, {}, None)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. A board takes no --column and --items; use nonet new FILE.yaml --data {path}, and give it FILE.yaml"
            ) from None
        section = make_data_section(source, table_format, folder / f"{name}{_DATA}", folder, notes)
    table_format = TableFormat.from_options(section.get("columns"), None)
    interactions = folder / section["interactions"]
    items = str(folder / section["items"]) if "items" in section else None
    profile = read_profile(str(interactions), items, table_format)
    baselines = _select_baselines(name, profile, items, table_format, notes)
    entries = []
    for protocol in wanted or [_choose_protocol(profile)]:
        if protocol in [entry.protocol for entry in known]:
            continue
        entry = BoardEntry(name=name, protocol=protocol, source=str(path), baselines=baselines)
        document = _make_document(entry, section, profile, table_format, folder)
        entries.append((entry, document | {"evaluate": {"width": _WIDTH, "users": "all"}}))
    return entries


def make_evaluate_options(baselines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of `evaluate` that all scenarios of a board have."""
    return {"metrics": METRICS, "baselines": [dict(options) for options in baselines], "shuffle_ties": True}


def _write_scenario(entry: BoardEntry, document: dict[str, Any], folder: Path) -> None:
    """Write the scenario of an entry with the board's metrics and baselines."""
    document["evaluate"] |= make_evaluate_options(entry.baselines)
    text = f"# {entry.name} by the protocol {entry.protocol} of nonet board. {PROTOCOLS[entry.protocol]}"
    write_whole(Path(entry.get_scenario(folder)), f"{text}\n{yaml.dump(document)}".encode())


def _choose_protocol(profile: DataProfile) -> str:
    """Choose `sessions` where users return to items, because `last` would mask these, and `last` elsewhere."""
    return "sessions" if profile.repeats > LIMIT else "last"


def _select_baselines(
    name: str, profile: DataProfile, items: str | None, table_format: TableFormat, notes: list[str]
) -> list[dict[str, Any]]:
    """Return the board's baselines that fit the items of a data set; `notes` get the reasons why others do not."""
    catalogue = (
        read_items(items, table_format)
        if items
        else pa.table({"item_id": pa.array(range(profile.items), pa.int64())})
    )
    fitting = []
    for options in _BASELINES:
        try:
            BASELINES.get(options["use"]).check_items(catalogue, options)
            fitting.append(options)
        except (ConfigError, DataError) as error:
            notes.append(f"{name}: {error}")
    return fitting


def _make_document(
    entry: BoardEntry,
    section: Mapping[str, Any],
    profile: DataProfile,
    table_format: TableFormat,
    folder: Path,
) -> dict[str, Any]:
    """Return the scenario of an entry without its `evaluate` section.

    Raises:
        ConfigError: The protocol needs times, and the data have none, or too many equal ones.
    """
    name = re.sub(r"\W", "_", entry.key)
    if entry.protocol == "last":
        return {"extends": "amazon-sid", "name": name, "data": dict(section)}
    document = {
        "name": name,
        "seed": 1,
        "settings": "data",
        "data": dict(section),
        "stages": {"pretrain": {}},
    }
    if entry.protocol == "sessions":
        document["data"] |= {"repeats": ALLOW, "split": {"use": "leave_last_out", "test": 1, "valid": 1}}
    else:
        if profile.counted or profile.first == profile.last:
            raise ConfigError(
                f"--protocol time: {entry.name} has no times, only the order of each user's events; use --protocol last"
            )
        times = np.asarray(
            read_interactions(str(folder / section["interactions"]), table_format)["timestamp"]
        )
        valid_s, test_s = np.quantile(times, _TIME_SHARES, method="nearest").astype(np.int64)
        if valid_s == test_s or (times >= test_s).mean() > _MAX_TEST_SHARE:
            raise ConfigError(
                f"--protocol time: {(times >= test_s).mean():.0%} of the events of {entry.name} are at or after the time that "
                "cuts off the newest tenth, because many have equal times; use --protocol last"
            )
        test = datetime.fromtimestamp(int(test_s), UTC).isoformat()
        document["data"]["split"] = {"use": "time", "test": test, "valid": int(test_s - valid_s)}
    return document
