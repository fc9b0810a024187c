"""Lists and copies: shipped scenarios, runs.

`nonet import`: other formats as the two Parquet tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from nonet.controller.record import list_runs
from nonet.controller.scenario import LIBRARY, find, load_scenario, shipped_names
from nonet.controller.setup import reward_options
from nonet.errors import ConfigError
from nonet.samples.importers import importer
from nonet.samples.tables import TableFormat


def describe_scenarios() -> list[dict[str, str]]:
    """Name and first comment of each shipped scenario."""
    return [
        {
            "name": name,
            "about": (LIBRARY / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# "),
        }
        for name in shipped_names()
    ]


def describe_runs() -> list[dict[str, Any]]:
    """Id, state and best headline of each run."""
    rows = []
    for folder in list_runs():
        report = folder.read_json("report.json")
        commits = sorted(path.name for path in folder.checkpoints.glob("step-*"))
        state = "finished" if report else f"resumable at {commits[-1]}" if commits else "nothing committed"
        last = list(report["stages"].values())[-1] if report and report["stages"] else {}
        rows.append(
            {"run": folder.id, "state": state, **{key: round(value, 4) for key, value in last.items()}}
        )
    return rows


def copy_scenario(source: str, target: Path) -> list[Path]:
    """Copy a scenario and the files it names to `target`'s folder; what was written. Never overwrites."""
    origin = find(source)
    if target.suffix not in (".yaml", ".yml"):
        target = target / f"{origin.stem}.yaml"
    scenario, folder = load_scenario(origin)
    named = {
        str(options.use).split(":", 1)[0]
        for _, _, options in reward_options(scenario)
        if options.use and ".py" in str(options.use)
    }
    pairs = [
        (origin, target),
        *((folder / name, target.parent / name) for name in sorted(named) if (folder / name).is_file()),
    ]
    for _, copy in pairs:
        if copy.exists():
            raise ConfigError(f"{copy} already exists; choose another path")
    for original, copy in pairs:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    return [copy for _, copy in pairs]


def start_scenario(
    names: list[str],
    data: Path | None,
    items: Path | None,
    columns: list[str],
    missing: list[str] | None = None,
) -> Iterator[str]:
    """What `nonet new` says: of a copy the files, of a scenario for `data` what was found and written. Raises ConfigError."""
    if data is None and (items or columns or missing is not None):
        raise ConfigError(
            "--items, --column and --missing belong to --data, which says where your tables are"
        )
    if len(names) != (2 if data is None else 1):
        raise ConfigError(
            f"nonet new wants SCENARIO FILE, or FILE --data DIR; got {' '.join(names)}"
            + (f" --data {data}" if data else "")
        )
    if data is None:
        yield from map(str, copy_scenario(names[0], Path(names[1])))
        return
    from nonet.deploy.new import new_from_data

    yield from new_from_data(Path(names[0]), data, items, _roles(columns), missing)


def _roles(columns: list[str]) -> dict[str, str]:
    """Role -> column of `--column ROLE=NAME`."""
    roles: dict[str, str] = {}
    for text in columns:
        role, equals, name = text.partition("=")
        if not equals:
            raise ConfigError(f"--column wants ROLE=NAME such as user=uid, got {text!r}")
        roles[role] = name
    return roles


def import_tables(
    form: str,
    source: Path,
    target: Path,
    columns: list[str],
    items: Path | None,
    notes: list[str] | None = None,
    missing: list[str] | None = None,
) -> dict[str, Any]:
    """Import tables and count what they hold.

    Args:
        form: the format's name.
        source: the files of that format.
        target: the folder for both Parquet tables.
        columns: ROLE=NAME each; of csv alone.
        items: the file of items; of csv alone.
        notes: gets what was decided on the way.
        missing: texts that stand for a missing value, None for the usual ones; of csv alone.

    Raises:
        ConfigError: an option is wrong, or belongs to another format.
        DataError: the files are wrong.
    """
    roles = _roles(columns)
    extra: dict[str, Any] = {}
    if form == "csv":
        texts = TableFormat.from_options(None, missing).missing
        extra = {"columns": roles or None, "items": items, "notes": notes, "missing": texts}
    elif roles or items or missing is not None:
        raise ConfigError(f"--column, --items and --missing belong to `import csv`, not to `import {form}`")
    counts = importer(form)(source, target, **extra)
    return asdict(counts) if is_dataclass(counts) and not isinstance(counts, type) else dict(counts)
