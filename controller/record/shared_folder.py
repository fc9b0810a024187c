"""All nodes of a run must reach its folder (docs/explanation/design.md, section 7): tried, not assumed.

The driver writes a token, which the controller reads back wherever Ray put it; the controller writes another for the workers, in
whatever image or mount they live. On one node workers are not asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Protocol

from nonet.controller.record.run_folder import RunFolder
from nonet.errors import PlacementError
from nonet.workers import explain_unreachable

# A mount may show a new file a little late.
_PAUSES_S = (0.0, 1.0, 3.0)
_TOKEN = ".reach"


_WHAT_TO_DO = (
    "every node of a run reads and writes its folder. Put it on a mount that all of them have, with --run-dir or NONET_RUNS, "
    "or keep the run on one node"
)


def leave_token(run: RunFolder) -> str:
    """Write a token into a run's folder, for `check_reached` of who is to work there."""
    token = secrets.token_hex(8)
    (run.path / _TOKEN).write_text(token, encoding="utf-8")
    return token


def check_reached(run: RunFolder, token: str, who: str) -> None:
    """Take the token out of a run's folder. Raises PlacementError where this process does not see it."""
    problem = ""
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        problem = explain_unreachable(run.path / _TOKEN, token)
        if not problem:
            (run.path / _TOKEN).unlink()
            return
    raise PlacementError(f"{run.path}: {who} {problem}; {_WHAT_TO_DO}")


class Reaching(Protocol):
    """A group of workers, as `ActorGroup` is one."""

    def check_shared_file(self, file: str, token: str) -> list[str]: ...


def check_shared(run: RunFolder, groups: Iterable[Reaching], nodes: Collection[str]) -> None:
    """Have every worker of the groups reach the run's folder where they and this process are on more than one node.

    Raises PlacementError that names who does not and what to do.
    """
    if len(set(nodes)) < 2:
        return
    file, token = run.path / _TOKEN, leave_token(run)
    try:
        waiting = list(groups)
        problems: list[str] = []
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            answers = [(group, group.check_shared_file(str(file), token)) for group in waiting]
            problems = [problem for _, said in answers for problem in said if problem]
            waiting = [group for group, said in answers if any(said)]
            if not waiting:
                return
    finally:
        file.unlink(missing_ok=True)
    more = f" (and {len(problems) - 1} more workers)" if len(problems) > 1 else ""
    raise PlacementError(f"{run.path}: {problems[0]}{more}; {_WHAT_TO_DO}")
