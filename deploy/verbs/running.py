"""The commands that start, plan and stop runs: `run`, `resume`, `tune`, `plan`, `submit` and `stop`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from nonet.deploy.verbs.questions import (
    AddressOption,
    JsonOption,
    RunArg,
    ScenarioArg,
    SetOption,
    name_on_cluster,
    print_summary,
    refuse_address,
)
from nonet.errors import ConfigError


def run(
    scenario: ScenarioArg,
    change: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(callback=refuse_address, help="The run's folder, by default a new one in $NONET_RUNS."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest complete checkpoint in --run-dir.")
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="7,8,9", help="Run once per seed, each in --run-dir/seed-N, with one combined report."
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Run on the cluster at RAY_ADDRESS, and return immediately."),
    ] = False,
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="RUN",
            help="Train on the events that are new since a finished run, from its weights; last is the newest of this scenario.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario from its tables to its report."""
    from nonet.deploy.run import api

    if continued is not None and (resume or seeds is not None):
        raise ConfigError("--continue starts one new run; omit --resume and --seeds")
    if seeds is not None:
        if resume or detach:
            raise ConfigError("--seeds resumes unfinished seeds by itself; omit --resume and --detach")
        _run_seeds(scenario, parse_seeds(seeds), change or [], run_dir, as_json)
        return
    if resume and detach:
        raise ConfigError(
            "--detach starts a new run; omit --resume, or omit --detach to continue the run from here"
        )
    if resume:
        print_result(_resume_run(scenario, change, run_dir), as_json)
        return
    opened = (
        nullcontext(api.scenario(scenario, change))
        if continued is None
        else api.continue_scenario(scenario, continued, change)
    )
    with opened as loaded:
        if not detach:
            print_result(api.run(loaded, run_dir=run_dir, command=_format_command()), as_json)
            return
        folder, warnings = api.start_detached(loaded, run_dir=run_dir, command=_format_command())
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        json.dumps({"run": folder.id})
        if as_json
        else f"{folder.id} is running; stop it with: nonet stop {folder.id}"
    )


def resume(
    run: RunArg,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C",
            help="Change a key under deadlines, or give a value of env.vars, which runs do not store; may be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run, or the runs of --seeds, from the newest complete checkpoint."""
    from nonet.controller.record import find_group
    from nonet.deploy.run import api

    if group := find_group(run):
        from nonet.deploy.after import resume_seeds

        _print_seeds(group, resume_seeds(group, change or []), as_json)
        return
    print_result(api.resume(run, changes=change), as_json)


def tune(
    scenario: ScenarioArg,
    space: Annotated[
        Path, typer.Option(help="YAML file with the keys to search and their candidate values.")
    ],
    trials: Annotated[int, typer.Option(min=1, help="Number of trials.")] = 12,
    change: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(callback=refuse_address, help="The folder of the search; an existing search continues."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Number of trials at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Search for the values of scenario keys with the best validation metric."""
    from nonet.deploy.tune import format_search_result, tune_scenario

    result = tune_scenario(
        scenario,
        space,
        trials,
        changes=change,
        run_dir=run_dir,
        parallel=parallel,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if result is None:
        raise typer.Abort
    print(json.dumps(result, indent=1) if as_json else format_search_result(result))


def make_board(
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH,...",
            help="Data sets as for `nonet new --data`, and scenarios; may be repeated. An existing board keeps its own.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="last,time,sessions",
            help="Protocols of the data sets, by default sessions where users return to items, else last.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Seeds of each entry, by default 1.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="2h", help="No run starts that is expected to end after this time.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(callback=refuse_address, help="The folder of the board; an existing board continues."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the recommender with baselines and published results on several data sets, by the same protocols."""
    from nonet.deploy.after.board import format_board, run_board
    from nonet.units import parse_seconds

    try:
        budget_s = None if budget is None else parse_seconds(budget)
    except ValueError as error:
        raise ConfigError(f"--budget: {error}") from None
    folder, result, is_complete = run_board(
        data or [],
        [part for part in (protocol or "").split(",") if part],
        [] if seeds is None else parse_seeds(seeds),
        budget_s=budget_s,
        run_dir=run_dir,
        command=_format_command(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(result, indent=1) if as_json else format_board(result, folder))
    if result["failed"]:
        sys.exit(1)
    if not is_complete:
        print(f"not complete. Continue with: nonet board --run-dir {folder}", file=sys.stderr)
        sys.exit(130)


def plan(
    scenario: ScenarioArg,
    change: SetOption = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster view (YAML), by default this machine.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Plan on the free resources of a live Ray: an address, or `auto`.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Compare possible placements, ranked by memory and traffic.")
    ] = False,
    origins: Annotated[
        bool, typer.Option("--origins", help="Show where each value that is not a default is written.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which workers would run on which nodes, and the resulting sizes."""
    from nonet.deploy.run import api, planning

    if origins:
        print(planning.describe_origins(scenario, change, as_json))
        return
    scenario_file, view = api.scenario(scenario, change), planning.choose_view(cluster, address)
    is_elsewhere = cluster is not None or address is not None
    if search:
        print(planning.describe_search(scenario_file, view, as_json, allows_absent=is_elsewhere))
        return
    print(
        planning.describe_plan(scenario_file, scenario_file.plan(view), as_json, allows_absent=is_elsewhere)
    )
    if not as_json and (summary := planning.summarise_origins(scenario, change)):
        print(f"\n{summary}")


def submit(
    scenario: ScenarioArg,
    address: AddressOption = None,
    change: SetOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Id of the run; submitting the same name again continues the run if it has not finished."
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of an environment variable that the cluster must have; its value does not travel; may be repeated.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the cluster has accepted the job.")
    ] = False,
) -> None:
    """Run a scenario as a Ray job; the folder of the scenario, of at most 10 MiB packed, is uploaded to the cluster."""
    from nonet.deploy.run.jobs import submit_job

    if not address:
        raise ConfigError(
            "--address is missing; give the URL of the cluster's dashboard, such as http://127.0.0.1:8265"
        )
    try:
        sys.exit(submit_job(scenario, address, change, name=name, env=env, detach=detach))
    except KeyboardInterrupt:
        print(
            f"interrupted; a job that was accepted continues: nonet runs --address {address}", file=sys.stderr
        )
        sys.exit(130)


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A folder, an id, a prefix, or `last`; with RAY_ADDRESS, the id on that cluster.",
        ),
    ],
    address: AddressOption = None,
) -> None:
    """Stop a run after a checkpoint, and stop all its processes."""
    if address:
        from nonet.deploy.run.jobs import ClusterClient, stop_cluster_run

        print(stop_cluster_run(ClusterClient(address), name_on_cluster(run)))
        return
    from nonet.deploy.run import steer, stop_run

    is_local = os.environ.get("RAY_ADDRESS", "local") in ("", "local")
    print(steer.stop(run) if is_local else stop_run(Path(run).name))


def parse_seeds(seeds: str) -> list[int]:
    """Parse the seeds of --seeds, such as "7,8,9". Raises ConfigError if one is not a whole number."""
    numbers = seeds.split(",")
    if not all(seed.strip().isdecimal() for seed in numbers):
        raise ConfigError(f"--seeds must be whole numbers such as 7,8,9, got {seeds!r}")
    return [int(seed) for seed in numbers]


def _run_seeds(
    scenario: str, seeds: list[int], changes: list[str], run_dir: Path | None, as_json: bool
) -> None:
    """Run a scenario for several seeds and print the combined result; exit with 130 if it was stopped."""
    from nonet.deploy.after import run_seeds

    _print_seeds(*run_seeds(scenario, seeds, changes, run_dir, _format_command()), as_json)


def _print_seeds(folder: Path, combined: dict[str, Any] | None, as_json: bool) -> None:
    """Print the combined result of several seeds; exit with 130 if a run was stopped."""
    from nonet.deploy.after import format_seeds

    if combined is None:
        print(f"stopped. Continue with: nonet resume {folder}", file=sys.stderr)
        sys.exit(130)
    if as_json:
        print(json.dumps(combined, indent=1))
    else:
        print(f"{format_seeds(combined)}\n\nreport     {folder / 'report.html'}")


def _resume_run(scenario: str, change: list[str] | None, run_dir: Path | None) -> Any:
    """Resume the run in --run-dir with the scenario of the command line, and return the finished run.

    Raises:
        ConfigError: --run-dir is missing or has no run.
    """
    from nonet.controller.record import RunFolder
    from nonet.deploy.run import api

    if run_dir is None:
        raise ConfigError("--resume needs --run-dir with the run's folder; or use: nonet resume RUN")
    stored = RunFolder(run_dir.absolute()).scenario
    if not stored.exists():
        raise ConfigError(f"{run_dir} has no run to resume; omit --resume to start one there")
    return api.resume(run_dir, scenario_file=api.scenario(scenario, change, stored=stored))


def print_result(run: Any, as_json: bool) -> None:
    """Print the report or the summary of a finished run; exit with 130 if it was stopped."""
    from nonet.controller.record import describe_place, get_location, is_ray_job

    if is_ray_job():
        print(f"this run's folder: {describe_place(run.folder)}", file=sys.stderr)
    if run.state == "stopped":
        print(
            f"stopped. Continue with: nonet resume {get_location(run.folder)}",
            file=sys.stderr,
        )
        sys.exit(130)
    if as_json:
        print(json.dumps(run.report, indent=1))
    else:
        print_summary(run.folder, run.folder.path / "report.html")


def _format_command() -> str:
    """Return the command line as the report shows it, without values of env.vars; "" if the program is not `nonet`."""
    from nonet.controller.scenario import hide_in_command

    return (
        shlex.join(["nonet", *hide_in_command(sys.argv[1:])])
        if os.path.basename(sys.argv[0]).startswith("nonet")
        else ""
    )
