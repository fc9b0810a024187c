"""Builds a ranker in a process of its own, as a check before a run: in the interpreter that will train it.

    python -m nonet.models.keras.check '{"options": {...}, "features": {...}}'

It prints {"parameters": n} or {"error": message} as its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nonet
from nonet.errors import ConfigError, NonetError

_TIMEOUT_S = 120.0  # TensorFlow alone takes 10 s to import on a cold machine.


def check_ranker(python: str, options: Mapping[str, Any], features: Mapping[str, int]) -> int:
    """Build a ranker in another process, and return the number of its parameters.

    Args:
        python: The interpreter.
        options: Options of `build`.
        features: Width of the rows of each feature.

    Raises:
        ConfigError: It cannot be built; the message is one line.
    """
    sources = str(Path(nonet.__path__[0]).parent)
    paths = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [python, "-m", __name__, json.dumps({"options": dict(options), "features": dict(features)})],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": paths},
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"model.path: the model cannot be built by {python}: {reason[:300]}")
    result = json.loads(lines[-1])
    if error := result.get("error"):
        raise ConfigError(error)
    return int(result["parameters"])


def main() -> None:
    """Build the ranker that the argument describes, and print the result as JSON."""
    from nonet.models.keras.builder import build

    request = json.loads(sys.argv[1])
    try:
        ranker = build(request["options"], (), request["features"], 0)
        result: dict[str, Any] = {"parameters": sum(weight.numel() for weight in ranker.parameters())}
    except NonetError as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
