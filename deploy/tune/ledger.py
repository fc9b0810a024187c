"""The ledger of a search, DIR/tune.json: the search's definition, and the result of each job.

The file is replaced atomically after each job (`nonet.atomic`), so a killed search continues from it:
finished jobs do not run again, and their results decide which jobs run next. The ledger belongs to one search:
opening it with another scenario, space or number of trials, or other data, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nonet.atomic import make_folder, read_content, write_whole
from nonet.deploy.tune.halving import TrialResult
from nonet.errors import ConfigError
from nonet.options import StrictModel, describe_invalid

LEDGER_FILE = "tune.json"


class _StoredSearch(StrictModel):
    """The content of a ledger's file."""

    search: dict[str, Any]
    results: list[TrialResult]
    best: dict[str, Any] | None = None


class SearchLedger:
    """The definition and the results of one search, and their file.

    Attributes:
        path: The ledger's file.
        search: The definition of the search, as JSON.
        results: Results in order of rung and trial number.
        best: The best result; None until the search has finished.
        knows_tables: Whether the file has hashes of the tables; those of earlier versions have none.
    """

    def __init__(self, folder: Path, search: Mapping[str, Any]):
        """Open the ledger of a folder, or prepare a new one. Raises ConfigError if it is damaged, or of another search."""
        self.path = folder / LEDGER_FILE
        self.search = json.loads(json.dumps(search))
        self.results: list[TrialResult] = []
        self.best: dict[str, Any] | None = None
        self.knows_tables = True
        if self.path.exists():
            stored = _read_ledger(self.path)
            self.knows_tables = "tables" in stored.search
            _check_same_search(self.path, stored.search, self.search)
            self.results = stored.results

    @property
    def begun(self) -> bool:
        """Whether there is a search to continue."""
        return self.path.exists()

    def add(self, result: TrialResult) -> None:
        """Add the result of a job and write the ledger."""
        self.results = sorted([*self.results, result], key=lambda result: (result.rung, result.number))
        self.write()

    def write(self) -> None:
        """Write the ledger atomically."""
        make_folder(self.path.parent)
        content = {
            "search": self.search,
            "results": [asdict(result) for result in self.results],
            "best": self.best,
        }
        write_whole(self.path, f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())


def _read_ledger(path: Path) -> _StoredSearch:
    """Read a ledger's file. Raises ConfigError if it is damaged, or another file."""
    try:
        return _StoredSearch.model_validate_json(read_content(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not the ledger of a search: {describe_invalid(error)}; choose another --run-dir"
        ) from None


def _check_same_search(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a stored search has the same definition as the given one."""
    if "tables" not in stored and "tables" in given:
        # Of an earlier version, which stored files without their folders.
        files = {Path(use).name: content for use, content in given["files"].items()}
        given = {**given, "files": files, "tables": None}
    different = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
    if different:
        differences = ", ".join(
            f"{name} (there {stored.get(name)!r}, here {given.get(name)!r})"
            if not isinstance(given.get(name), dict | list)  # these are too long for a message
            else name
            for name in different
        )
        raise ConfigError(
            f"{path.parent} has another search, which differs in {differences}; use the original options and data to continue, "
            "or choose another --run-dir"
        )
