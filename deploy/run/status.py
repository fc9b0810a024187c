"""The status of a run in a folder of this machine: what it does, what it waits for, and the logs of its processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from nonet.atomic import refuse_damage
from nonet.controller.record import CONTROLLER, RunFolder, is_running
from nonet.deploy.run.progress import format_metrics
from nonet.errors import ConfigError
from nonet.storage import fetch, find_copy, is_written_now
from nonet.suggest import make_printable

_POLL_S = 0.5
# The beginning of a status in the log of a controller, from where the dashboard of a cluster has it.
_STATUS_LINE = b'{"format": '
_ENDED = ("done", "stopped", "failed")
_LATE_S = 30.0  # without a status, after which a controller seems to hang; it writes one at least every 10 s


def describe_folder(run: RunFolder) -> dict[str, Any]:
    """Return the status of a run as `jobs.describe_run` does, from its folder.

    The state is "running", "starting", "done", "stopped", "failed" or "interrupted".
    """
    fetch(run.status)
    fetch(run.report)
    status = dict(run.read_status())
    state = status.get("state", "starting")
    if run.report.exists():
        state = "done"
    elif not is_in_progress(run):
        state = state if state in _ENDED else "interrupted"
    elif state in _ENDED:  # it has been resumed, and its controller has not written yet
        state = "starting"
    started_s = status.pop("started", None) or (
        run.scenario.stat().st_mtime if run.scenario.exists() else None
    )
    row: dict[str, Any] = {"run": run.id, "state": state}
    if started_s:
        with refuse_damage(run.status):
            row["started"] = datetime.fromtimestamp(started_s).astimezone().isoformat(timespec="seconds")
    row |= {key: value for key, value in status.items() if key not in ("run", "state", "format")}
    return row | {"folder": str(run.path)}


def has_ended(status: Mapping[str, Any]) -> bool:
    """Return whether a status is that of a run that no process works on."""
    return status["state"] in (*_ENDED, "interrupted", "lost")


def format_status(status: Mapping[str, Any]) -> str:
    """Format a status as aligned lines."""
    lines = {"run": f"{status['run']}: {status['state']}"}
    if progress := format_stage(status):
        lines["stage"] = progress
    if "started" in status:
        lines["started"] = status["started"][:19].replace("T", " ")
    if "job" in status:
        code = f", exit code {status['exit_code']}" if "exit_code" in status else ""
        lines["job"] = f"{status['job']} {status['job_state']}{code}"
    if status.get("address"):
        lines["address"] = status["address"]
    elif "folder" in status:
        lines["folder"] = f"{status['folder']}{' on ' + status['host'] if status.get('host') else ''}"
    if groups := status.get("groups"):
        lines["workers"] = ", ".join(f"{name} x{group['workers']}" for name, group in groups.items())
    if isolated := status.get("isolated"):
        lines["isolated"] = "; ".join(isolated)
    for key in ("storage", "error", "message"):
        if status.get(key):
            lines[key] = status[key]
    if not has_ended(status) and (waits := explain_waits(status)):
        lines["waits"] = "; ".join(waits)
    return make_printable("\n".join(f"{name:<10} {text}" for name, text in lines.items()))


def format_stage(status: Mapping[str, Any]) -> str:
    """Format the phase or the stage of a status, such as "rl 3/40  reward 0.3100"; "" if neither is known."""
    if status.get("phase") and not has_ended(status):
        return f"before the first stage: {status['phase']}"
    if "stage" not in status:
        return ""
    steps = f" {status.get('step', 0)}/{status['steps']}" if status.get("steps") else ""
    metrics = format_metrics(status.get("metrics", {}))
    return f"{status['stage']}{steps}{'  ' if metrics else ''}{metrics}"


def explain_waits(status: Mapping[str, Any]) -> list[str]:
    """Return what a run waits for, one clause per wait, from its status; also if its controller has fallen silent."""
    waits = list(status.get("waits", ()))
    # Whether a stored run is alive, the clock of its storage says (`is_run_elsewhere`).
    silent_s = time.time() - status["at"] if "at" in status and not status.get("address") else 0.0
    if silent_s > _LATE_S:
        waits.insert(
            0,
            f"the controller (pid {status['pid']} on {status['host']}) has written no status for {silent_s:.0f} s",
        )
    return waits


def print_folder_logs(run: RunFolder, role: str | None, rank: int, *, follow: bool) -> None:
    """Print the log of the controller or of a worker of a run, and with `follow` what is written until the run ends.

    The statuses in the log of the controller are left out: `nonet status` shows them.

    Raises:
        ConfigError: The run has no such worker, or its log is not among Ray's on this machine.
    """
    with refuse_damage(run.status):
        files = _find_log_files(run, role, rank)
    positions = dict.fromkeys(files, 0)
    while True:
        ended = not follow or has_ended(
            describe_folder(run)
        )  # read before the logs, so that their ends are printed
        for file in files:
            with file.open("rb") as source:
                source.seek(positions[file])
                data = source.read()
            if not ended:  # a line that is being written is printed when it is complete
                data = data[: data.rfind(b"\n") + 1]
            positions[file] += len(data)
            lines = (line for line in data.splitlines(keepends=True) if not line.startswith(_STATUS_LINE))
            sys.stdout.write(b"".join(lines).decode("utf-8", "replace"))
        sys.stdout.flush()
        if ended:
            return
        time.sleep(_POLL_S)


def _find_log_files(run: RunFolder, role: str | None, rank: int) -> list[Path]:
    """Return the files of standard output and standard error of a controller or a worker. Raises ConfigError without one."""
    status = describe_folder(run)
    if not status.get("log"):
        raise ConfigError(
            f"{run.id} has no log: its controller has not started, or an earlier version ran it"
        )
    controller_log, groups = Path(status["log"]), status.get("groups", {})
    pid = status["pid"]
    if role not in (None, CONTROLLER):
        group = groups[find_group_of_role(run.id, groups, role)]
        if rank >= len(group.get("pids", ())):
            raise ConfigError(
                f"run {run.id} has no rank {rank} of {role}; it has {len(group.get('pids', ()))} started workers, numbered from 0"
            )
        pid = group["pids"][rank]
    folder = controller_log.parent
    if not isinstance(pid, int) or not folder.match("session_*/logs") or folder.resolve() != folder:
        raise ConfigError(
            f"{run.status} names the log {controller_log} of process {pid!r}, which is none of Ray's (.../session_*/logs); "
            "the file is damaged, so resume the run"
        )
    outs = folder.glob(f"worker-*-{pid}.out")
    files = [file for out in outs for file in (out, out.with_suffix(".err")) if _is_plain(file)]
    if not files:
        raise ConfigError(
            f"the log of process {pid} is not in {controller_log.parent}; it ran on another node or Ray has removed it"
        )
    return files


def _is_plain(file: Path) -> bool:
    """Return whether a path is a file, and no link to one elsewhere."""
    return file.is_file() and not file.is_symlink()


def find_group_of_role(run_id: str, groups: Mapping[str, Any], role: str | None) -> str:
    """Return the name of the group that has a role, or that is named by it.

    Args:
        run_id: The id of the run, for the message.
        groups: The groups of the run's status, by name.
        role: The role.

    Raises:
        ConfigError: No group has the role.
    """
    for name, group in groups.items():
        if role in (name, *group["roles"]):
            return name
    roles = [role for group in groups.values() for role in group["roles"]]
    raise ConfigError(f"run {run_id} has no role {role!r}; roles: {', '.join([CONTROLLER, *roles])}")


def is_in_progress(run: RunFolder) -> bool:
    """Return whether a process works on a run, on this machine or, if the run is stored, on another one."""
    with contextlib.suppress(OSError):  # a folder that cannot be locked: no process runs in it
        if is_running(run):
            return True
    return is_run_elsewhere(run)


def is_run_elsewhere(run: RunFolder) -> bool:
    """Return whether another machine works on a stored run, by its status and the age of its head in the storage."""
    if find_copy(run.path) is None or run.report.exists():
        return False
    status = run.read_status()
    return status.get("state", "starting") in ("starting", "running") and is_written_now(run.path)
