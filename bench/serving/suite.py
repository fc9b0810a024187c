"""`nonet bench serve`: the rate that an engine holds at a p99, merged and one at a time, beside Hugging Face; versions; states.

Everything runs in this process at the engine's queue, in turn, on one thread of torch; `--set run=RUN` names the run, sections
are merging, queue, versions, swaps and states.
"""

from __future__ import annotations

from typing import Any

from nonet.bench.serving.queue import merging, queue
from nonet.bench.serving.states import states
from nonet.bench.serving.versions import swaps, versions
from nonet.errors import ConfigError

_SECTIONS = {"merging": merging, "queue": queue, "versions": versions, "swaps": swaps, "states": states}


def serve(
    run: str = "last", sections: str = "merging,queue,versions,swaps,states", rounds: int = 3
) -> dict[str, Any]:
    """Rows and ratios of the sections."""
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
