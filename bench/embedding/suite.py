"""`nonet bench embedding`: the cost of the sparse core beside torch's dense gather, FBGEMM's TBE and torch's optimizers.

Every section is a process of its own with one thread and transparent huge pages, for torch too
(THP_MEM_ALLOC_ENABLE=1 must be set before torch is imported). A ratio is ours / theirs, medians of this thread's CPU
time over calls in turn in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SECTIONS = ("rows_1m", "rows_8m", "small", "adam", "growth", "eviction", "rows_100m")
_SECTION_S = 600
_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The allocator keeps what is freed: else a heap that ends in a result costs every side 60 us of page faults a call.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
}


def bench_embedding(seeds: list[int], sections: tuple[str, ...] = SECTIONS) -> dict[str, Any]:
    """Return rows and ratios of these sections; one that cannot run here is a row with its reason."""
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    for section in sections:
        result = _run(section, seeds[0])
        rows += result["rows"]
        ratio |= result["ratio"]
    return {"rows": rows, "ratio": ratio}


def _run(section: str, seed: int) -> dict[str, Any]:
    """Run a section in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nonet.bench.embedding.sections", section, str(seed)],
        env=os.environ | _ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_SECTION_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"rows": [{"section": section, "failed": last}], "ratio": {}}
    return json.loads(done.stdout.splitlines()[-1])
