"""The commands that look at runs in progress: `status`, `logs` and `why`, and the hidden `job`, which runs a submitted job."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from nonet.atomic import refuse_damage
from nonet.deploy.verbs.questions import AddressOption, JsonOption, RunArg, name_on_cluster
from nonet.errors import ConfigError
from nonet.storage import is_storage_address
from nonet.suggest import make_printable

_WATCH_EVERY_S = 2.0  # between two lines of `status --watch`


def status(
    run: RunArg = "last",
    address: AddressOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print a line when something has changed, until the run ends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a run is doing: its stage and step, its job, its workers, and what it waits for."""
    from nonet.deploy.run import status as run_status

    describe = _find_status(run, address)
    if watch:
        _watch(describe, as_json)
        return
    row = describe()
    with _refuse_damaged(row):
        print(json.dumps(row, indent=1) if as_json else run_status.format_status(row))


def logs(
    run: RunArg = "last",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    role: Annotated[
        str | None,
        typer.Option(help="The log of a worker of this role, or `controller`; by default that of the job."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="With --role: the rank of the worker, by default 0.")
    ] = None,
    address: AddressOption = None,
) -> None:
    """Print the log of a run's job, or of one of its processes on whichever node that is."""
    if rank is not None and role is None:
        raise ConfigError("--rank needs --role, such as --role rollout --rank 3")
    if address:
        from nonet.deploy.run.jobs import ClusterClient, find_cluster_run, print_run_logs

        client = ClusterClient(address)
        print_run_logs(client, find_cluster_run(client, name_on_cluster(run)), role, rank or 0, follow=follow)
        return
    from nonet.controller.record import find_run
    from nonet.deploy.run import status as run_status

    run_status.print_folder_logs(find_run(run), role, rank or 0, follow=follow)


def why(run: RunArg = "last", address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Say what a run waits for: a placement group, a worker, data, a deadline."""
    from nonet.deploy.run import status as run_status

    row = _find_status(name_on_cluster(run) if address else run, address)()
    if run_status.has_ended(row):
        raise ConfigError(f"{row['run']} is not in progress ({row['state']}), so it waits for nothing")
    with _refuse_damaged(row):
        waits = run_status.explain_waits(row)
        stage = run_status.format_stage(row)
    if address:
        from nonet.deploy.run.jobs import ClusterClient, find_cluster_run, list_waits

        client = ClusterClient(address)
        waits += [
            wait for wait in list_waits(client, find_cluster_run(client, row["run"])) if wait not in waits
        ]
    if as_json:
        print(json.dumps({"run": row["run"], "state": row["state"], "waits": waits}, indent=1))
        return
    place = f" ({stage})" if stage else ""
    print(make_printable(f"{row['run']}: {row['state']}{place}"))
    # The clock of the controller's machine may be ahead of this one.
    now = time.time()
    quiet_s = row.get("quiet_s", 0.0) + max(0.0, now - row.get("at", now))
    for line in waits or [f"waits for nothing: its last progress was {quiet_s:.0f} s ago"]:
        print(make_printable(f"  {line}"))


def job(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of the run.")],
) -> None:
    """Run the job that `nonet submit` made, in the job's working directory."""
    from nonet.deploy.run.jobs import run_submitted
    from nonet.deploy.verbs.running import print_result

    print_result(run_submitted(run, Path.cwd()), as_json=False)


def _find_status(run: str, address: str | None) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the status of a run. Raises ConfigError for no run.

    The status is read from the cluster if an address is given, except for a run that is named by its place in object storage.
    """
    if address and not is_storage_address(run):
        from nonet.deploy.run.jobs import ClusterClient, describe_run, find_cluster_run

        client = ClusterClient(address)
        run_id = find_cluster_run(client, run).id
        return lambda: describe_run(client, find_cluster_run(client, run_id))
    from nonet.controller.record import find_run
    from nonet.deploy.run import status as run_status

    folder = find_run(run)
    return lambda: run_status.describe_folder(folder)


def _refuse_damaged(row: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which values that no controller writes are an error that names the run's status."""
    return refuse_damage(Path(row.get("folder") or row["run"]) / "status.json")


def _watch(describe: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Print a line for each change of a status until the run ends."""
    from nonet.deploy.run import status as run_status

    last_shown = None
    while True:
        row = describe()
        with _refuse_damaged(row):
            waits = [] if run_status.has_ended(row) else run_status.explain_waits(row)
            stage = run_status.format_stage(row)
        line = "  ".join(filter(None, [row["state"], stage, f"waits: {waits[0]}" if waits else ""]))
        line = make_printable(line)
        if as_json:
            line = json.dumps({key: value for key, value in row.items() if key not in ("at", "quiet_s")})
        progress, waits_mark, wait = line.partition("  waits: ")
        shown = line if as_json else progress + waits_mark + re.sub(r"\d+ s\b", "", wait)
        if shown != last_shown:  # the seconds of a wait alone are no change
            print(line if as_json else f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
            last_shown = shown
        if run_status.has_ended(row):
            sys.exit(0 if row["state"] == "done" else 1)
        time.sleep(_WATCH_EVERY_S)
