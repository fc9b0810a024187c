"""`nonet bench serve`: the rate that an engine holds at a p99, merged and one at a time, beside Hugging Face; versions; states.

Sections merging, queue, versions, swaps, states and filters run in this process, in turn, on one thread of torch;
`http` serves the run on a Ray of its own, `batch` answers a table of users. `--set run=RUN` names the run.
"""

from __future__ import annotations

from typing import Any

from nonet.bench.serving.batch import batch
from nonet.bench.serving.filters import filters
from nonet.bench.serving.over_http import http
from nonet.bench.serving.queue import merging, queue
from nonet.bench.serving.states import states
from nonet.bench.serving.versions import swaps, versions
from nonet.errors import ConfigError

_SECTIONS = {
    "merging": merging,
    "queue": queue,
    "versions": versions,
    "swaps": swaps,
    "states": states,
    "filters": filters,
    "http": http,
    "batch": batch,
}


def serve(
    run: str = "last",
    sections: str = "merging,queue,versions,swaps,states",
    rounds: int = 3,
    users: float = 1e5,
) -> dict[str, Any]:
    """Rows and ratios of the sections; users: of the section `batch`."""
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    for name in sections.split(","):
        if name not in _SECTIONS:
            raise ConfigError(f"sections: there is no {name!r}; there are {', '.join(_SECTIONS)}")
        more = {"users": int(users)} if name == "batch" else {}
        some, ratios = _SECTIONS[name](run, rounds, **more)
        rows += some
        ratio |= ratios
    return {"rows": rows, "ratio": ratio}
