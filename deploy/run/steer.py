"""Changes to a run in progress: attach and detach rewards, set weights and floors, change numbers of workers, stop the run.

Commands are put into the run's queue (`nonet.controller.record.CommandQueue`). The run applies or refuses them between two
steps, those about rewards between two RL steps. A request to stop is a file in the run's folder.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.controller.plan import scale_roles
from nonet.controller.record import SCALE, CommandQueue, RunFolder, find_run, is_running, open_for_writing
from nonet.controller.scenario import RewardOptions, check_supported, load_scenario
from nonet.controller.setup import copy_with_siblings
from nonet.deploy.run.status import is_run_elsewhere
from nonet.errors import ConfigError
from nonet.plugins import parse_file
from nonet.rl.rewards import check_options, find_reward
from nonet.run_code import CodePart
from nonet.trust import approve_parts

_POLL_S = 0.1
_REWARD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
_ACCEPT_PATIENCE_S = 30.0  # for a request to stop; a driver checks for requests at least every 10 s
STOP_PATIENCE_S = (
    120.0  # for the end of a run that was asked to stop; a driver then stops it without a checkpoint
)


def attach(
    run: str | Path,
    use: str,
    *,
    name: str | None = None,
    weight: float = 1.0,
    stage: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[RunFolder, str]:
    """Ask a run to use one more reward.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        use: The reward as in a scenario; a file is relative to the current directory.
        name: The reward's name in the run, by default the name of its function or class.
        weight: The reward's weight.
        stage: The RL stage, by default the one in progress.
        options: Keyword arguments of the reward, and options that all rewards have.

    Returns:
        The run's folder and the id of the command.

    Raises:
        ConfigError: The run is not in progress, or the reward, its options or its name are wrong.
    """
    folder = _find_steered_run(run, "attach")
    reward_options = RewardOptions(use=use, weight=weight, **(options or {}))
    target = find_reward(use, Path.cwd(), name=name)
    check_options(target, reward_options.get_options(), name=name)
    reward_name = name or _choose_name(use, target)
    if not _REWARD_NAME.fullmatch(reward_name):
        raise ConfigError(
            f"the reward's name is {reward_name!r}; it must consist of letters, digits, - and _, and start with a letter or _: "
            "--name my_reward"
        )
    if parse_file(use) is not None and _is_elsewhere(folder):
        raise ConfigError(
            f"attach: {use} is a file of this machine, and another one runs {folder.id}; attach it there, or name a module that "
            "both machines have, and that NONET_TRUST approves there"
        )
    copied_use, digest, parts = _copy_source(open_for_writing(folder), use)
    with suppress(OSError):  # a home that cannot be written: the run refuses code that is not approved
        approve_parts(parts)
    command_options = reward_options.model_dump(exclude_unset=True) | {"use": copied_use}
    return folder, CommandQueue(folder).ask(
        verb="attach", name=reward_name, stage=stage, options=command_options, original=use, sha256=digest
    )


def detach(run: str | Path, name: str, *, stage: str | None = None) -> tuple[RunFolder, str]:
    """Ask a run to continue without a reward.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        name: The reward's name in the run.
        stage: The RL stage, by default the one in progress.

    Returns:
        The run's folder and the id of the command.
    """
    folder = _find_steered_run(run, "detach")
    return folder, CommandQueue(folder).ask(verb="detach", name=name, stage=stage)


def set_value(run: str | Path, path: str, value: Any) -> tuple[RunFolder, str]:
    """Ask a run to change the weight or the floor of a reward.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        path: The key's path in the scenario, such as stages.rl.rewards.novelty.weight.
        value: The new value.

    Returns:
        The run's folder and the id of the command.
    """
    folder, parts = _find_steered_run(run, "set"), path.split(".")
    stage = parts[1] if len(parts) > 2 and parts[0] == "stages" else None
    return folder, CommandQueue(folder).ask(verb="set", name=path, stage=stage, value=value)


def scale(run: str | Path, workers_by_role: Mapping[str, int]) -> tuple[RunFolder, str]:
    """Ask a run to change the number of workers of roles or rewards.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        workers_by_role: The number of workers by role or reward.

    Returns:
        The run's folder and the id of the command.

    Raises:
        ConfigError: The run is not in progress, or the roles do not exist or do not allow these numbers.
    """
    folder = _find_steered_run(run, SCALE)
    scale_roles(load_scenario(folder.scenario)[0], workers_by_role)
    name = " ".join(f"{role}={workers}" for role, workers in workers_by_role.items())
    return folder, CommandQueue(folder).ask(verb=SCALE, name=name, workers=dict(workers_by_role))


def wait_for_answer(folder: RunFolder, command: str, timeout_s: float) -> dict[str, Any] | None:
    """Wait for the run's answer to a command.

    Args:
        folder: The run's folder.
        command: The id of the command.
        timeout_s: Seconds to wait.

    Returns:
        The answer; None if there was none in time. The command then stays in the queue.
    """
    _wait_until(lambda: CommandQueue(folder).read_answer(command) is not None, timeout_s)
    return CommandQueue(folder).read_answer(command)


def stop(run: str | Path, notice_s: float = _ACCEPT_PATIENCE_S, timeout_s: float = STOP_PATIENCE_S) -> str:
    """Stop a run on a local Ray: request a checkpoint at the next step, and wait until the run has ended.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        notice_s: Seconds within which the run's driver must accept the request, by deleting its file.
        timeout_s: Seconds to wait for the end of the run after that.

    Returns:
        A message that says what was done.

    Raises:
        ConfigError: The run has finished, no process runs it, or its process does not accept the request.
    """
    folder = open_for_writing(_find_active_run(run, "there is nothing to stop"))
    write_whole(folder.stop_request, b"")
    if not _wait_until(lambda: not folder.stop_request.exists() or not is_running(folder), notice_s):
        folder.stop_request.unlink(missing_ok=True)
        raise ConfigError(
            f"{folder.id} did not accept the request to stop within {notice_s:g} s; to stop a run on a cluster (--detach), set "
            "RAY_ADDRESS to that cluster"
        )
    if not _wait_until(lambda: not is_running(folder), timeout_s):
        return f"{folder.id} stops after its current step; it has not ended within {timeout_s:g} s"
    folder.stop_request.unlink(missing_ok=True)
    return describe_stop(folder.id, has_finished=folder.report.exists())


def describe_stop(run: str, *, has_finished: bool) -> str:
    """Return the answer to a request to stop a run, which may have finished instead."""
    if has_finished:
        return f"{run} has finished: only its end was left when it was asked to stop"
    return f"stopped {run}"


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition is true; return False if it is not within the time."""
    deadline_s = time.monotonic() + timeout_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return is_true


def _find_steered_run(run: str | Path, verb: str) -> RunFolder:
    """Return the folder of a run in progress. Raises ConfigError if the verb does not work for it, or it is not in progress.

    A run in object storage may be run by another machine, which receives commands through the storage.
    """
    folder = find_run(run)
    check_supported(load_scenario(folder.scenario)[0], verb, folder.id)
    if _is_elsewhere(folder):
        return folder
    return _find_active_run(run, "change the scenario, and start a new run")


def _is_elsewhere(folder: RunFolder) -> bool:
    """Return whether another machine, and no process of this one, works on a run."""
    return not is_running(folder) and is_run_elsewhere(folder)


def _find_active_run(run: str | Path, suggestion: str) -> RunFolder:
    """Return the folder of a run in progress. Raises ConfigError if it has finished or no process runs it."""
    folder = find_run(run)
    if folder.report.exists():
        raise ConfigError(f"{folder.id} has finished; {suggestion}")
    if _is_elsewhere(folder):
        raise ConfigError(
            f"{folder.id} is not run by a process of this machine; stop it on its cluster: nonet stop {folder.id} --address URL"
        )
    if not is_running(folder):
        raise ConfigError(f"{folder.id} is not in progress; continue it with: nonet resume {folder.id}")
    return folder


def _copy_source(folder: RunFolder, use: str) -> tuple[str, str, list[CodePart]]:
    """Copy the file of a reward, and the files beside it, into the run.

    Returns:
        `use` with the copy instead of the file, the file's sha256, and the code that its user attaches. If `use` names no file,
        nothing is copied, and the result has `use` and "".
    """
    file = parse_file(use)
    if file is None:
        return use, "", [CodePart(references={use})]
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    copy_path = folder.sources / f"attached-{digest[:12]}" / Path(file).name
    copies = copy_with_siblings(Path(file).resolve(), copy_path)
    files = {str(copy.relative_to(folder.path)): sha256 for copy, sha256 in copies.items()}
    copied_use = f"{copy_path.relative_to(folder.sources)}{use.removeprefix(file)}"
    return copied_use, copies[copy_path], [CodePart(files=files), CodePart(references={copied_use})]


def _choose_name(use: str, target: Any) -> str:
    """Return the default name of a reward: its function's or class's name, or the last part of an address."""
    if "://" in use:
        return use.rstrip("/").rpartition("/")[2].partition("?")[0].replace(".", "_") or "reward"
    return getattr(target, "__name__", type(target).__name__)
