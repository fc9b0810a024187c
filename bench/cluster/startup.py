"""How long `import nonet` and `nonet --help` take, as whole processes; medians of several."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

_ROUNDS = 9
_LOADED = "import sys, nonet; print(int('torch' in sys.modules), int('ray' in sys.modules))"


def startup() -> dict[str, Any]:
    """Seconds of a bare interpreter, of `import nonet` and of `nonet --help`, interleaved; and what the import loaded."""
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import nonet": [sys.executable, "-c", "import nonet"],
        "nonet --help": [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "--help"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(_ROUNDS):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - began)
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True
    ).stdout.split()
    rows = [
        {"command": name, "median_s": statistics.median(values), "max_s": max(values)}
        for name, values in seconds.items()
    ]
    rows.append({"import nonet loads torch": loaded[0], "ray": loaded[1]})
    added = statistics.median(seconds["import nonet"]) - statistics.median(seconds["python"])
    return {"rows": rows, "ratio": {"seconds that import nonet adds": added}}
