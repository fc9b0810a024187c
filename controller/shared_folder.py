"""The folder of a run over several nodes must be one that all of them reach (CONTRACTS 7): tried, not assumed.

The controller writes a token; the workers, in whatever image or mount they live, read it back. On one node nothing is asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Protocol

from nonet.controller.run_folder import RunFolder
from nonet.errors import PlacementError

# A mount may show a new file a little late.
_PAUSES_S = (0.0, 1.0, 3.0)


class Reaching(Protocol):
    """A group of workers, as `Hosts` is one."""

    def reach(self, file: str, token: str) -> list[str]: ...


def check_shared(run: RunFolder, groups: Iterable[Reaching], nodes: Collection[str]) -> None:
    """Have every worker of the groups reach the run's folder where they and this process are on more than one node.

    Raises PlacementError that names who does not and what to do.
    """
    if len(set(nodes)) < 2:
        return
    file, token = run.path / ".reach", secrets.token_hex(8)
    file.write_text(token, encoding="utf-8")
    try:
        waiting = list(groups)
        problems: list[str] = []
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            answers = [(group, group.reach(str(file), token)) for group in waiting]
            problems = [problem for _, found in answers for problem in found if problem]
            waiting = [group for group, found in answers if any(found)]
            if not waiting:
                return
    finally:
        file.unlink(missing_ok=True)
    more = f" (and {len(problems) - 1} more workers)" if len(problems) > 1 else ""
    raise PlacementError(
        f"{run.path}: {problems[0]}{more}; every node of a run reads and writes its folder. Put it on a mount that all of "
        "them have, with --run-dir or NONET_RUNS, or keep the run's pools on one node"
    )
