"""Own files of a scenario: every `file.py` that a `use:` names, copied into the run, which works from its copies alone.

`sources.json` says which copy stands for which `use`, with its sha256. The originals may be edited or deleted while a run goes
on, and before it is resumed; a copy that changed is an error (docs/design.md, section 7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, document
from nonet.errors import ConfigError
from nonet.plugins import Files, file_of


def named_files(scenario: Scenario) -> list[str]:
    """Every `file.py` that some `use:` of the scenario names, once each, as it is written there."""
    return list(dict.fromkeys(filter(None, map(file_of, _uses(document(scenario))))))


def keep_copies(scenario: Scenario, folder: Path, run: RunFolder) -> None:
    """Copy own files, looked for beside the scenario in `folder`, into the run. Raises ConfigError for one that is missing."""
    records = []
    for use in named_files(scenario):
        origin = (folder / use).resolve()
        if not origin.is_file():
            raise ConfigError(f"use: {use}: there is no file {origin}; it is looked for beside the scenario")
        content = origin.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        place = run.sources / _name_of_copy(use, digest)
        make_folder(place.parent)
        write_whole(place, content)
        records.append({"use": use, "copy": str(place.relative_to(run.sources)), "sha256": digest})
    run.write_json(run.sources_list.name, records)


def read_copies(run: RunFolder) -> Files:
    """The copies that a run keeps. Raises ConfigError where one is missing or is not what the run began with."""
    records = run.read_json(run.sources_list.name) or []
    for record in records:
        place = run.sources / record["copy"]
        if not place.is_file():
            raise ConfigError(
                f"{place}, the run's copy of {record['use']}, is gone; put it back, or start a new run"
            )
        digest = hashlib.sha256(place.read_bytes()).hexdigest()
        if digest != record["sha256"]:
            raise ConfigError(
                f"{place} was changed since the run began (sha256 {digest[:12]}, the run's is {record['sha256'][:12]}): a run "
                f"goes on with what it began with; put it back, or start a new run with the changed {record['use']}"
            )
    return Files(str(run.sources), {record["use"]: record["copy"] for record in records})


def _name_of_copy(use: str, digest: str) -> str:
    """A file below the scenario keeps its place; of others two may have one name."""
    path = Path(use)
    outside = path.is_absolute() or ".." in path.parts
    return f"outside-{digest[:12]}/{path.name}" if outside else str(path)


def _uses(value: Any) -> Iterator[Any]:
    """What stands under a key `use`, anywhere."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and "use" in value:
        yield value["use"]
    for part in parts:
        yield from _uses(part)
