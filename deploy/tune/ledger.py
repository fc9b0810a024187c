"""The ledger of a search, DIR/tune.json: what was asked for, and what became of each job as it ended.

It is replaced whole after each job (`nonet.atomic`), so a search that was killed goes on from it: jobs that are in it do not run
again, and what it says decides what runs next. It belongs to one search: another scenario, space or number of trials is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.deploy.tune.halving import Result
from nonet.errors import ConfigError

NAME = "tune.json"


class Ledger:
    """search: what the search is of, as JSON; results: by rung and number; best: None until the end."""

    def __init__(self, folder: Path, search: Mapping[str, Any]):
        """Raises ConfigError where the folder holds another search, or anything else."""
        self.path = folder / NAME
        self.search = json.loads(json.dumps(search))
        self.results: list[Result] = []
        self.best: dict[str, Any] | None = None
        if self.path.exists():
            stored = _read(self.path)
            _check_same(self.path, stored["search"], self.search)
            self.results = [Result(**each) for each in stored["results"]]

    @property
    def begun(self) -> bool:
        """Whether there is a search to go on with."""
        return self.path.exists()

    def add(self, result: Result) -> None:
        """Keep what became of a job."""
        self.results = sorted([*self.results, result], key=lambda each: (each.rung, each.number))
        self.write()

    def write(self) -> None:
        make_folder(self.path.parent)
        content = {
            "search": self.search,
            "results": [asdict(each) for each in self.results],
            "best": self.best,
        }
        write_whole(self.path, f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not the ledger of a search: {error}; choose another --run-dir"
        ) from None


def _check_same(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    other = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
    if other:
        small = ", ".join(
            f"{name} (there {stored.get(name)!r}, here {given.get(name)!r})"
            if not isinstance(given.get(name), dict | list)
            else name
            for name in other
        )
        raise ConfigError(
            f"{path.parent} holds a search with another {small}; give what it began with to go on, "
            "or choose another --run-dir"
        )
