"""`nonet bench serve`: the rate of an engine at a p99, merged and one at a time, beside Hugging Face; versions; states.

The sections merging, joins, queue, versions, swaps, states and filters run in this process, in turn, on one thread of torch;
`http` serves the run on a separate Ray. `--set run=RUN` names the run.
"""

from __future__ import annotations

from typing import Any

from nonet.bench.serving.filters import bench_filters
from nonet.bench.serving.over_http import bench_http
from nonet.bench.serving.queue import bench_joins, bench_merging, bench_queue
from nonet.bench.serving.states import bench_states
from nonet.bench.serving.versions import bench_swaps, bench_versions
from nonet.errors import ConfigError

_SECTIONS = {
    "merging": bench_merging,
    "joins": bench_joins,
    "queue": bench_queue,
    "versions": bench_versions,
    "swaps": bench_swaps,
    "states": bench_states,
    "filters": bench_filters,
    "http": bench_http,
}


def bench_serve(
    run: str = "last",
    sections: str = "merging,queue,versions,swaps,states",
    rounds: int = 3,
) -> dict[str, Any]:
    """Return rows and ratios of the sections.

    Args:
        run: The run.
        sections: Names of sections, separated by commas.
        rounds: Rounds of each section.

    Raises:
        ConfigError: A section is unknown.
    """
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    for name in sections.split(","):
        if name not in _SECTIONS:
            raise ConfigError(f"sections: there is no {name!r}; there are {', '.join(_SECTIONS)}")
        some, ratios = _SECTIONS[name](run, rounds)
        rows += some
        ratio |= ratios
    return {"rows": rows, "ratio": ratio}
