"""The work of the commands `scenarios`, `runs`, `versions`, `new` and `import`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nonet.atomic import refuse_damage
from nonet.controller.record import (
    RunFolder,
    list_all_runs,
    list_stored_runs,
    name_run,
    read_start_time,
)
from nonet.controller.scenario import (
    LIBRARY,
    find_scenario,
    list_shipped_scenarios,
    load_scenario,
    read_document,
)
from nonet.controller.setup import list_named_files
from nonet.deploy.run import is_in_progress
from nonet.errors import ConfigError
from nonet.samples.importers import get_importer
from nonet.samples.tables import TableFormat
from nonet.storage import find_copy, read_address
from nonet.suggest import make_printable


def describe_scenarios() -> list[dict[str, str]]:
    """Return {"name": name, "about": first comment} of each shipped scenario."""
    return [
        {
            "name": name,
            "about": (LIBRARY / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# "),
        }
        for name in list_shipped_scenarios()
    ]


def describe_runs(place: str | None = None) -> list[dict[str, Any]]:
    """Return {"run", "state", "started", "seconds", "stage"} with the last stage's metrics of each run, oldest first.

    `started` is an ISO 8601 time. `seconds` and the metrics are missing until the run has finished; until then a run has the
    `step` of its stage. The state of a run with a damaged report or status is "damaged".

    Args:
        place: The address of runs in object storage, such as s3://bucket/runs; None for the runs of this machine.

    Raises:
        ConfigError: There is no run at the address, or it cannot be read.
    """
    rows = []
    for folder in list_all_runs() if place is None else list_stored_runs(place):
        started = datetime.fromtimestamp(read_start_time(folder)).astimezone().isoformat(timespec="seconds")
        try:
            with refuse_damage(folder.report):
                row = _describe_progress(folder, is_fresh=place is not None)
        except ConfigError:  # its `nonet report` or `nonet status` names the file
            row = {"state": "damaged"}
        rows.append({"run": name_run(folder), "state": row["state"], "started": started, **row})
    return rows


def _describe_progress(folder: RunFolder, *, is_fresh: bool) -> dict[str, Any]:
    """Return the state of a run, and how far it is or what its last stage reached.

    Args:
        folder: The folder of the run.
        is_fresh: Whether the folder has just been read from object storage.

    Raises:
        ConfigError: A file is damaged.
    """
    report = folder.read_json("report.json")
    row: dict[str, Any] = {"state": "done" if report else _describe_unfinished(folder, is_fresh)}
    if not report and (status := folder.read_status()).get("steps"):
        row |= {"stage": status["stage"], "step": f"{status['step']}/{status['steps']}"}
    if report and "total" in report.get("wall_s", {}):
        row["seconds"] = round(report["wall_s"]["total"], 1)
    if report and report["stages"]:
        stage, metrics = list(report["stages"].items())[-1]
        row |= {"stage": stage, **{name: value and round(value, 4) for name, value in metrics.items()}}
    return row


def _describe_unfinished(run: RunFolder, is_fresh: bool) -> str:
    """Return the state of a run without a report; `is_fresh` is as for `_describe_progress`."""
    if is_in_progress(run):
        return "running"
    if copy := find_copy(run.path):
        stored = copy.get_tree().select("checkpoints")
        checkpoints = sorted({name.split("/")[1] for name in stored if name.endswith("/manifest.json")})
    else:
        checkpoints = sorted(path.name for path in run.checkpoints.glob("step-*"))
    if not is_fresh and read_address(
        run.path
    ):  # another machine may have continued it: `nonet runs s3://...` says
        return f"in storage, last seen at {checkpoints[-1]}" if checkpoints else "in storage"
    return f"resumable at {checkpoints[-1]}" if checkpoints else "no checkpoint"


def format_runs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of `describe_runs` as a table, with a column for each metric of any of the runs."""
    shown_rows = []
    for row in rows:
        # A metric is None where the labels do not define it.
        facts = {
            **{name: value for name, value in row.items() if value is not None},
            **({"started": row["started"][:16].replace("T", " ")} if "started" in row else {}),
        }
        numbers = {name: f"{value:.4f}" for name, value in facts.items() if isinstance(value, float)}
        seconds = {"seconds": f"{row['seconds']:.0f}"} if "seconds" in row else {}
        shown_rows.append({**facts, **numbers, **seconds})
    return format_table(shown_rows, first=("run", "state", "started", "seconds", "stage", "step", "job"))


def format_versions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the versions of a run as a table."""
    shown_rows = [
        {**row, "bytes": f"{row['bytes']:,}", "rows": f"{row['rows']:,}"} if "bytes" in row else row
        for row in rows
    ]
    return format_table(shown_rows)


def format_table(rows: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> str:
    """Format rows as an aligned text table with a header; a cell is "-" where its row lacks the column.

    Args:
        rows: The cells of each row by column.
        first: The columns that come first, in this order, if a row has them.
    """
    columns = dict.fromkeys(name for name in (*first, *(name for row in rows for name in row)))
    columns = [name for name in columns if any(name in row for row in rows)]
    texts = [columns, *([str(row.get(name, "-")) for name in columns] for row in rows)]
    cells = [[make_printable(text.replace("\n", " ")) for text in row] for row in texts]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    is_number = [
        all(cell == "-" or cell.replace(",", "").replace(".", "").isdecimal() for cell in column[1:])
        for column in zip(*cells, strict=True)
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    )


def copy_scenario(source: str, target: Path) -> list[Path]:
    """Copy a scenario, the files that it extends, and the Python files that they name.

    Args:
        source: The scenario's file or the name of a shipped one.
        target: The file or the folder to write.

    Returns:
        The files that were written.

    Raises:
        ConfigError: A file exists already, or the scenario extends a file outside of its folder; nothing is written.
    """
    source_path = find_scenario(source)
    if target.suffix not in (".yaml", ".yml"):
        target = target / f"{source_path.stem}.yaml"
    scenario, folder = load_scenario(source_path)
    parents = [path for path in read_document(source_path).parents if path.parent != LIBRARY]
    for parent in parents:
        if not parent.is_relative_to(folder):
            raise ConfigError(
                f"{source_path.name} extends {parent}, which is outside of its folder and is not copied with it; copy that file"
            )
    # A file that only a shipped scenario names is read beside that one, and an absolute path is the same in the copy.
    text = "\n".join(path.read_text(encoding="utf-8") for path in (source_path, *parents))
    own_names = {
        name
        for name in list_named_files(scenario)
        if not Path(name).is_absolute() and Path(name).name in text and (folder / name).is_file()
    }
    names = sorted(own_names | {str(parent.relative_to(folder)) for parent in parents})
    original_by_copy = {target: source_path} | {target.parent / name: folder / name for name in names}
    for copy in original_by_copy:
        if copy.exists():
            raise ConfigError(f"{copy} already exists; choose another path")
    for copy, original in original_by_copy.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    return list(original_by_copy)


def create_scenario(
    names: list[str],
    data: Path | None,
    items: Path | None,
    columns: list[str],
    missing: list[str] | None = None,
    target: str | None = None,
) -> Iterator[str]:
    """Run `nonet new`: copy a scenario, or create one for the user's tables.

    Args:
        names: The scenario to copy and the file to write; with `data`, only the file to write.
        data: The folder of the user's tables, or a file of interactions.
        items: The file of items.
        columns: Assignments of columns, each "ROLE=NAME".
        missing: Texts that stand for a missing value; None for the default ones.
        target: The condition that says which events are clicks, for a click model; None for a recommender.

    Yields:
        Lines of text: the files that were written, and what was found in the data.

    Raises:
        ConfigError: An argument is wrong.
    """
    if data is None and (items or columns or missing is not None or target is not None):
        raise ConfigError("--items, --column, --missing and --target need --data, the path of your tables")
    if len(names) != (2 if data is None else 1):
        raise ConfigError(
            f"nonet new needs SCENARIO FILE, or FILE --data DIR; got {' '.join(names)}"
            + (f" --data {data}" if data else "")
        )
    if data is None:
        yield from map(str, copy_scenario(names[0], Path(names[1])))
        return
    from nonet.deploy.new import create_from_data

    yield from create_from_data(Path(names[0]), data, items, parse_roles(columns), missing, target)


def parse_roles(columns: list[str]) -> dict[str, str]:
    """Parse `--column ROLE=NAME` options into columns by role. Raises ConfigError if one has no `=`."""
    columns_by_role: dict[str, str] = {}
    for text in columns:
        role, equals_sign, name = text.partition("=")
        if not equals_sign:
            raise ConfigError(f"--column must be ROLE=NAME such as user=uid, got {text!r}")
        columns_by_role[role] = name
    return columns_by_role


def import_tables(
    form: str,
    source: Path,
    target: Path,
    columns: list[str],
    items: Path | None,
    notes: list[str] | None = None,
    missing: list[str] | None = None,
) -> dict[str, Any]:
    """Convert tables of another format to the two Parquet tables.

    Args:
        form: The format's name: an importer.
        source: The files of that format.
        target: The folder for both Parquet tables.
        columns: Assignments of columns, each "ROLE=NAME"; only for csv.
        items: The file of items; only for csv.
        notes: A list to which notes about decisions are appended.
        missing: Texts that stand for a missing value, None for the default ones; only for csv.

    Returns:
        The importer's counts of users, items, events and so on, by name.

    Raises:
        ConfigError: An option is wrong, or belongs to another format.
        DataError: The files cannot be read, or their contents are invalid.
    """
    columns_by_role = parse_roles(columns)
    options: dict[str, Any] = {}
    if form == "csv":
        missing_texts = TableFormat.from_options(None, missing).missing
        options = {
            "columns": columns_by_role or None,
            "items": items,
            "notes": notes,
            "missing": missing_texts,
        }
    elif columns_by_role or items or missing is not None:
        raise ConfigError(
            f"--column, --items and --missing only apply to `import csv`, not to `import {form}`"
        )
    counts = get_importer(form)(source, target, **options)
    return asdict(counts) if is_dataclass(counts) and not isinstance(counts, type) else dict(counts)
