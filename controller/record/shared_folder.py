"""Checks that all nodes of a run reach its folder (docs/explanation/design.md, section 4).

The driver writes a token into the folder, and the controller reads it on the node where Ray placed the controller. Then the
controller writes another token for the workers, which may run in other images or with other mounts. If all processes are on
one node, the workers are not checked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Protocol

from nonet.controller.record.run_folder import RunFolder
from nonet.errors import PlacementError
from nonet.workers import explain_unreachable

# Pauses before each attempt to read: some network mounts show a new file only after a delay.
_PAUSES_S = (0.0, 1.0, 3.0)
_TOKEN_FILE = ".reach"


_REMEDY = (
    "every node of a run reads and writes its folder. Put it on a mount that all of them have, with --run-dir or NONET_RUNS, "
    "or keep the run on one node"
)


def write_token(run: RunFolder) -> str:
    """Write a new token into the folder of a run, for `check_reached` in another process, and return it."""
    token = secrets.token_hex(8)
    (run.path / _TOKEN_FILE).write_text(token, encoding="utf-8")
    return token


def check_reached(run: RunFolder, token: str, process_name: str) -> None:
    """Check that this process reads the token in the folder of a run, and remove the token.

    Args:
        run: The folder of the run.
        token: The expected token.
        process_name: The name of this process in the message.

    Raises:
        PlacementError: This process does not see the token.
    """
    problem = ""
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        problem = explain_unreachable(run.path / _TOKEN_FILE, token)
        if not problem:
            (run.path / _TOKEN_FILE).unlink()
            return
    raise PlacementError(f"{run.path}: {process_name} {problem}; {_REMEDY}")


class ReachableGroup(Protocol):
    """A group of workers whose access to a file can be checked."""

    def check_shared_file(self, file: str, token: str) -> list[str]:
        """Return one description of the problem per worker, empty for a worker that reads the token in the file."""
        ...


def check_shared(run: RunFolder, groups: Iterable[ReachableGroup], nodes: Collection[str]) -> None:
    """Check that all workers reach the folder of a run, if the workers and this process are on more than one node.

    Args:
        run: The folder of the run.
        groups: The groups of workers.
        nodes: The ids of the nodes of the workers and of this process.

    Raises:
        PlacementError: A worker does not reach the folder; the message names the worker and the remedy.
    """
    if len(set(nodes)) < 2:
        return
    file, token = run.path / _TOKEN_FILE, write_token(run)
    try:
        remaining_groups = list(groups)
        problems: list[str] = []
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            answers = [(group, group.check_shared_file(str(file), token)) for group in remaining_groups]
            problems = [problem for _, by_worker in answers for problem in by_worker if problem]
            remaining_groups = [group for group, by_worker in answers if any(by_worker)]
            if not remaining_groups:
                return
    finally:
        file.unlink(missing_ok=True)
    more = f" (and {len(problems) - 1} more workers)" if len(problems) > 1 else ""
    raise PlacementError(f"{run.path}: {problems[0]}{more}; {_REMEDY}")
