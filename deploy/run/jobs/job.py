"""The run of a submitted job: in the job's working directory, on the cluster."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import nonet
from nonet.controller.record import RunFolder, create_run, describe_place, find_runs_root, find_stored_run
from nonet.controller.scenario import hide_in_command, is_of_run
from nonet.controller.setup import describe_code
from nonet.deploy.run import api
from nonet.deploy.run.jobs.package import PackageListing, read_listing
from nonet.errors import ConfigError
from nonet.trust import approve_code, approve_parts


def run_submitted(run: str, folder: Path) -> Any:
    """Run the scenario of an unpacked package, or continue it from its newest checkpoint if the run has one.

    Args:
        run: The id of the run.
        folder: The folder of the unpacked package.

    Returns:
        The finished run.

    Raises:
        ConfigError: The package is incomplete, an environment variable is missing, this is another version of Nonet, or the
            run has finished.
    """
    listing = read_listing(folder)
    if listing.nonet != nonet.__version__:
        raise ConfigError(
            f"the cluster has nonet {nonet.__version__}, and the job was submitted by nonet {listing.nonet}; "
            "use the same version on both sides"
        )
    if missing := [name for name in listing.env if name not in os.environ]:
        raise ConfigError(
            f"the job's environment lacks {', '.join(missing)} (--env); set {'it' if len(missing) == 1 else 'them'} where "
            "the cluster's nodes are started, since Ray shows the values that a job sends to everybody"
        )
    scenario_path = folder / listing.scenario
    if is_of_run(scenario_path):  # the package is a folder of a run, whose code the user has submitted
        with suppress(OSError):  # a home that cannot be written: this process has approved it
            approve_code(scenario_path.parent)
    scenario_file = api.scenario(scenario_path, listing.changes)
    storage = scenario_file.scenario.storage
    run_folder = find_stored_run(storage.url, run) if storage else RunFolder(find_runs_root() / run)
    if run_folder and run_folder.report.exists():
        raise ConfigError(
            f"run {run} has finished: see {describe_place(run_folder)}; to run again, submit with another --name"
        )
    if run_folder and list(run_folder.checkpoints.glob("step-*")):
        # The user has submitted this code again: approve it, but nothing else that the folder of the run may have.
        approve_parts([describe_code(scenario_file.scenario, scenario_file.folder)])
        scenario_file = api.scenario(scenario_path, listing.changes, stored=run_folder.scenario)
        return api.resume(run_folder.path, scenario_file=scenario_file)
    command = _describe_submission(run, listing)
    storage_url = storage.url if storage else None
    new_run = create_run(run, None if storage else find_runs_root() / run, storage_url, run_id=run)
    return api.run(scenario_file, run_dir=new_run, command=command)


def _describe_submission(run: str, listing: PackageListing) -> str:
    """Return the command that submitted a run, without secret values."""
    words = [
        "nonet",
        "submit",
        listing.scenario,
        *(word for change in listing.changes for word in ("--set", change)),
    ]
    return shlex.join(hide_in_command([*words, "--name", run]))
