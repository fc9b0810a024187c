"""The run of a submitted job: in the job's working directory, on the cluster."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import nonet
from nonet.controller.record import RunFolder, create_run, find_runs_root
from nonet.controller.scenario import hide_in_command
from nonet.deploy.run import api
from nonet.deploy.run.jobs.package import read_listing
from nonet.errors import ConfigError


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
    run_folder = RunFolder(find_runs_root() / run)
    if run_folder.report.exists():
        raise ConfigError(
            f"run {run} has finished: see {run_folder.path / 'report.html'}; to run again, submit with another --name"
        )
    if list(run_folder.checkpoints.glob("step-*")):
        scenario_file = api.scenario(scenario_path, listing.changes, stored=run_folder.scenario)
        return api.resume(run_folder.path, scenario_file=scenario_file)
    scenario_file = api.scenario(scenario_path, listing.changes)
    words = [
        "nonet",
        "submit",
        listing.scenario,
        *(word for change in listing.changes for word in ("--set", change)),
    ]
    command = shlex.join(hide_in_command([*words, "--name", run]))
    return api.run(scenario_file, run_dir=create_run(run, run_folder.path).path, command=command)
