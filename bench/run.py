"""`nonet bench NAME`: print the figures behind the README's tables, and write them as JSON.

{"name", "ratio": {measure: float}, "rows": [...], "command", "versions", "seed"}. A ratio compares two things measured in
the same run.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nonet.bench.attention import attention
from nonet.bench.cluster import dispatch, placement, startup
from nonet.bench.embedding import embedding
from nonet.bench.runs import feed, quickstart, receipt, repeat
from nonet.errors import ConfigError

_BENCHES: dict[str, Callable[[list[int], str], dict[str, Any]]] = {
    "attention": lambda seeds, device: attention(device),
    "dispatch": lambda seeds, device: dispatch(),
    "embedding": lambda seeds, device: embedding(seeds),
    "feed": lambda seeds, device: feed(seeds),
    "placement": lambda seeds, device: placement(),
    "quickstart": lambda seeds, device: quickstart(seeds),
    "receipt": lambda seeds, device: receipt(),
    "repeat": lambda seeds, device: repeat(seeds[0]),
    "startup": lambda seeds, device: startup(),
}


def run_bench(name: str, json_file: Path | None, seeds: list[int], device: str = "cpu") -> None:
    """Run one bench and print its rows. Raises ConfigError that lists the benches."""
    if name not in _BENCHES:
        raise ConfigError(f"there is no bench {name!r}; there are {', '.join(_BENCHES)}")
    found = _BENCHES[name](seeds, device)
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
