"""Steer a run while it goes on: attach and detach rewards, set their weights and floors.

A command goes into the run's queue (`nonet.controller.record.Commands`); the run takes it between two RL steps, or refuses it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.controller.record import Commands, RunFolder, claim, find_run
from nonet.controller.setup import copy_with_siblings
from nonet.errors import ConfigError
from nonet.plugins import parse_file
from nonet.rl.rewards import check_options, find_reward

_LOOK_S = 0.1
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
_NOTICE_S = 30.0  # a driver looks for requests at least every 10 s
_STOP_S = 120.0


def attach(
    run: str | Path,
    use: str,
    *,
    name: str | None = None,
    weight: float = 1.0,
    stage: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[RunFolder, str]:
    """Ask a run for one more reward; (run, id of the command). `use` as in a scenario, a file relative to here; `options`: its
    keyword arguments and those of every reward. Raises ConfigError where that is wrong already."""
    folder = _going_on(run)
    from nonet.controller.scenario import RewardOptions

    made = RewardOptions(use=use, weight=weight, **(options or {}))
    target = find_reward(use, Path.cwd(), name=name)
    check_options(target, made.options(), name=name)
    title = name or _title(use, target)
    if not _WORD.fullmatch(title):
        raise ConfigError(
            f"the reward's name is {title!r}; it must be letters, digits, - and _, the first a letter or _: --name my_reward"
        )
    kept, digest = _kept(folder, use)
    body = made.model_dump(exclude_unset=True) | {"use": kept}
    return folder, Commands(folder).ask(
        verb="attach", name=title, stage=stage, options=body, original=use, sha256=digest
    )


def detach(run: str | Path, name: str, *, stage: str | None = None) -> tuple[RunFolder, str]:
    """Ask a run to go on without a reward; (run, id of the command)."""
    folder = _going_on(run)
    return folder, Commands(folder).ask(verb="detach", name=name, stage=stage)


def set_value(run: str | Path, path: str, value: Any) -> tuple[RunFolder, str]:
    """Ask a run to change a weight or a floor, by its path in the scenario; (run, id of the command)."""
    folder, parts = _going_on(run), path.split(".")
    stage = parts[1] if len(parts) > 2 and parts[0] == "stages" else None
    return folder, Commands(folder).ask(verb="set", name=path, stage=stage, value=value)


def wait(folder: RunFolder, command: str, timeout_s: float) -> dict[str, Any] | None:
    """The run's answer, None where it has not come within so long: the command stays in the queue."""
    _becomes(lambda: Commands(folder).answer(command) is not None, timeout_s)
    return Commands(folder).answer(command)


def stop(run: str | Path, notice_s: float = _NOTICE_S, timeout_s: float = _STOP_S) -> str:
    """Stop a run of a local Ray: ask the process that runs it for a checkpoint at the next step, and wait for its end.

    Args:
        run: A folder, an id, a prefix, or `last`.
        notice_s: Seconds within which that process must take the request.
        timeout_s: Seconds to wait for its end after that.

    Returns:
        What was done.

    Raises:
        ConfigError: The run is over, nobody runs it, or its process does not take the request.
    """
    folder = _going_on(run, "there is nothing to stop")
    write_whole(folder.stop_request, b"")
    if not _becomes(lambda: not folder.stop_request.exists() or not _is_held(folder), notice_s):
        folder.stop_request.unlink(missing_ok=True)
        raise ConfigError(
            f"{folder.id} did not take the request to stop within {notice_s:g} s; a run on a cluster (--detach) is stopped with "
            "RAY_ADDRESS set to that cluster"
        )
    if not _becomes(lambda: not _is_held(folder), timeout_s):
        return f"{folder.id} stops after its step; it has not ended within {timeout_s:g} s"
    folder.stop_request.unlink(missing_ok=True)
    return f"stopped {folder.id}"


def _becomes(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; return whether it does within the time."""
    deadline = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return holds


def _going_on(run: str | Path, when_over: str = "start a run with the reward in its scenario") -> RunFolder:
    """The folder of a run under way. Raises ConfigError where it is over, or nobody runs it."""
    folder = find_run(run)
    if folder.report.exists():
        raise ConfigError(f"{folder.id} is over; {when_over}")
    if not _is_held(folder):
        raise ConfigError(f"{folder.id} does not go on now; go on with: nonet resume {folder.id}")
    return folder


def _is_held(folder: RunFolder) -> bool:
    """Return whether a process runs it."""
    try:
        claim(folder).close()
    except ConfigError:
        return True
    return False


def _kept(folder: RunFolder, use: str) -> tuple[str, str]:
    """`use` by the run's own copy of its file, and that one's sha256; what names no file stays as it is."""
    file = parse_file(use)
    if file is None:
        return use, ""
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    place = folder.sources / f"attached-{digest[:12]}" / Path(file).name
    copy_with_siblings(Path(file).resolve(), place)
    return f"{place.relative_to(folder.sources)}{use.removeprefix(file)}", digest


def _title(use: str, target: Any) -> str:
    """What a reward is called where nobody says: its function's or class's name, of an address its last part."""
    if "://" in use:
        return use.rstrip("/").rpartition("/")[2].partition("?")[0].replace(".", "_") or "reward"
    return getattr(target, "__name__", type(target).__name__)
