"""The time of `import nonet` and `nonet --help` as whole processes; medians of several."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

from nonet.bench.timing import measure_in_turns

_ROUNDS = 9
_LOADED = "import sys, nonet; print(int('torch' in sys.modules), int('ray' in sys.modules))"


def bench_startup() -> dict[str, Any]:
    """Return the seconds of an interpreter, of `import nonet` and of `nonet --help`, interleaved, and what was loaded."""
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import nonet": [sys.executable, "-c", "import nonet"],
        "nonet --help": [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "--help"],
    }
    calls = {
        name: partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        for name, command in commands.items()
    }
    times = measure_in_turns(calls, _ROUNDS)
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True
    ).stdout.split()
    rows = [
        {"command": name, "median_s": timer.compute_median_s(), "max_s": max(timer.wall_s)}
        for name, timer in times.items()
    ]
    rows.append({"import nonet loads torch": loaded[0], "ray": loaded[1]})
    added = times["import nonet"].compute_median_s() - times["python"].compute_median_s()
    return {"rows": rows, "ratio": {"seconds that import nonet adds": added}}
