"""`nonet bench NAME`: print the figures behind the README's tables, and write them as JSON.

{"name", "ratio": {measure: float}, "rows": [...], "command", "versions", "seed"}. A ratio compares two things measured in
the same run.
"""

from __future__ import annotations

import json
import platform
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError

# Each bench's function, and which of the command's options it takes.
_BENCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention": ("nonet.bench.attention.suite:attention", ("device",)),
    "dispatch": ("nonet.bench.cluster.dispatch:dispatch", ()),
    "embedding": ("nonet.bench.embedding.suite:embedding", ("seeds",)),
    "feed": ("nonet.bench.runs.feed:feed", ("seeds",)),
    "placement": ("nonet.bench.cluster.placement:placement", ()),
    "quickstart": ("nonet.bench.runs.quickstart:quickstart", ("seeds",)),
    "receipt": ("nonet.bench.runs.receipt:receipt", ()),
    "repeat": ("nonet.bench.runs.quickstart:repeat", ("seeds",)),
    "startup": ("nonet.bench.cluster.startup:startup", ()),
}


def run_bench(name: str, json_file: Path | None, seeds: list[int], device: str = "cpu") -> None:
    """Run one bench and print its rows. Raises ConfigError that lists the benches."""
    if name not in _BENCHES:
        raise ConfigError(f"there is no bench {name!r}; there are {', '.join(_BENCHES)}")
    home, takes = _BENCHES[name]
    module, _, function = home.partition(":")
    options = {"seeds": seeds, "device": device}
    found = getattr(import_module(module), function)(*(options[option] for option in takes))
    versions = {package: version(package) for package in ("nonet", "ray", "torch", "numpy")} | {
        "python": platform.python_version()
    }
    result = {"name": name, **found, "command": f"nonet bench {name}", "versions": versions, "seed": seeds[0]}
    for row in result["rows"]:
        print("  ".join(f"{key} {_shown(value)}" for key, value in row.items()))
    for measure, value in result["ratio"].items():
        print(f"{measure}: {_shown(value)}")
    if json_file:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
