"""The command line. `nonet --help` imports neither torch nor Ray; each command imports what it needs.

Exit codes: 0 success, 1 the run failed, 2 wrong input (one readable line on stderr, no traceback).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nonet.deploy.verbs import (
    JsonOption,
    RunArg,
    ScenarioArg,
    SetOption,
    VerbGroup,
    data,
    questions,
    serving,
    steering,
)
from nonet.errors import ConfigError, NonetError
from nonet.plugins import load_heavy

app = typer.Typer(
    name="nonet",
    cls=VerbGroup,
    help="Generative recommendation from clicks to reinforcement learning, under one controller on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; expected errors become one line and an exit code."""
    try:
        code = app(standalone_mode=False)
        if isinstance(code, int) and code:  # typer returns 130 for a Ctrl-C that no command handled
            print("nonet: interrupted", file=sys.stderr)
            sys.exit(code)
    except NonetError as error:
        _exit_with_error(error)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except typer.Abort:
        sys.exit(130)
    except OSError as error:
        if error.filename is None:  # not about a path of the user
            raise
        _exit_with_error(ConfigError(f"{error.filename}: {error.strerror}; it cannot be read or written"))
    except Exception as error:
        shown = getattr(error, "format_message", None)  # click's usage errors
        if shown is None:
            raise
        print(f"nonet: {shown()}", file=sys.stderr)
        sys.exit(2)


@app.command()
def run(
    scenario: ScenarioArg,
    change: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run's folder, by default a new one in $NONET_RUNS."),
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
    as_json: JsonOption = False,
) -> None:
    """Run a scenario from its tables to its report."""
    from nonet.deploy.run import api

    if seeds is not None:
        if resume or detach:
            raise ConfigError("--seeds resumes unfinished seeds by itself; omit --resume and --detach")
        _run_seeds(scenario, _parse_seeds(seeds), change or [], run_dir, as_json)
        return
    if detach:
        started = api.start_detached(
            api.scenario(scenario, change), run_dir=run_dir, command=_format_command()
        )
        print(
            json.dumps({"run": started.id})
            if as_json
            else f"{started.id} is running; stop it with: nonet stop {started.id}"
        )
        return
    if resume:
        _print_result(_resume_run(scenario, change, run_dir), as_json)
        return
    _print_result(
        api.run(api.scenario(scenario, change), run_dir=run_dir, command=_format_command()), as_json
    )


@app.command()
def resume(
    run: RunArg,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="A value of env.vars, which runs do not store; may be repeated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a run from its newest complete checkpoint."""
    from nonet.deploy.run import api

    _print_result(api.resume(run, changes=change), as_json)


@app.command()
def tune(
    scenario: ScenarioArg,
    space: Annotated[Path, typer.Option(help="YAML file with the keys and the values that each may take.")],
    trials: Annotated[int, typer.Option(min=1, help="Number of trials.")] = 12,
    change: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The folder of the search; an existing search continues.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Number of trials at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Search keys of a scenario for the best validation metric."""
    from nonet.deploy.tune import format_search_result, tune_scenario

    found = tune_scenario(
        *(scenario, space, trials),
        changes=change,
        run_dir=run_dir,
        parallel=parallel,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if found is None:
        raise typer.Abort
    print(json.dumps(found, indent=1) if as_json else format_search_result(found))


@app.command()
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
        bool, typer.Option("--search", help="Rank other placements by memory and traffic.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what would run where, and the resulting sizes."""
    from nonet.deploy.run import api, planning

    if search:
        print(
            planning.describe_search(
                api.scenario(scenario, change), planning.choose_view(cluster, address), as_json
            )
        )
        return
    source = api.scenario(scenario, change)
    print(planning.describe_plan(source, source.plan(planning.choose_view(cluster, address)), as_json))


@app.command()
def submit(
    scenario: ScenarioArg,
    address: Annotated[str, typer.Option(help="The cluster's job server, such as http://127.0.0.1:8265.")],
    change: SetOption = None,
    wait: Annotated[bool, typer.Option(help="Follow the job's log until it ends.")] = True,
) -> None:
    """Run a scenario as a Ray job, to which its folder is sent."""
    from nonet.deploy.run import submit_job

    sys.exit(submit_job(scenario, address, change or [], wait))


@app.command()
def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A folder, an id, a prefix, or `last`; with RAY_ADDRESS, the id on that cluster.",
        ),
    ],
) -> None:
    """Stop a run after a checkpoint, and stop all its processes."""
    from nonet.deploy.run import steer, stop_run

    local = os.environ.get("RAY_ADDRESS", "local") in ("", "local")
    print(steer.stop(run) if local else stop_run(Path(run).name))


for verb in (questions.runs, questions.report, questions.evaluate, questions.recommend):
    app.command()(verb)
for verb in (
    serving.serve,
    serving.top,
    serving.versions,
    serving.publish,
    serving.promote,
    serving.rollback,
    serving.export,
):
    app.command()(verb)
app.command()(questions.tradeoff)
app.command()(steering.attach)
app.command()(steering.detach)
app.command("set")(steering.set_value)

reward = typer.Typer(no_args_is_help=True, help="Rewards of RL stages.")
app.add_typer(reward, name="reward")
reward.command("test")(steering.try_out_reward)


items = typer.Typer(no_args_is_help=True, help="Add and withdraw items after a run.")
app.add_typer(items, name="items")
items.command("add")(data.add)


MissingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--missing",
        metavar="TEXT",
        help="A text that means a missing value, instead of NA, null ...; '' for an empty text; may be repeated.",
    ),
]


@app.command("import")
def import_(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="movielens, csv or sequences.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The file or folder to convert.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for interactions.parquet and items.parquet.")
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="ROLE=NAME",
            help="Name of a column: user=uid, item=sku, time=ts ...; may be repeated.",
        ),
    ] = None,
    items: Annotated[Path | None, typer.Option(help="The file of items.")] = None,
    missing: MissingOption = None,
) -> None:
    """Convert another format to the two Parquet tables."""
    from nonet.deploy.verbs import listing

    notes: list[str] = []
    counts = listing.import_tables(form, source, target, column or [], items, notes, missing)
    for note in notes:
        print(f"note: {note}")
    print(f"{target}: " + ", ".join(f"{value} {name}" for name, value in counts.items()))


@app.command()
def scenarios(as_json: JsonOption = False) -> None:
    """List the shipped scenarios."""
    from nonet.deploy.verbs import listing

    rows = listing.describe_scenarios()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:<16} {row['about']}")


@app.command()
def new(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[SCENARIO] FILE", help="The scenario to copy (not with --data), and the file to write."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Your tables: a folder, or a file of interactions.")
    ] = None,
    items: Annotated[Path | None, typer.Option(help="The file of items.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="ROLE=NAME",
            help="Name of a column: user=uid, item=sku, time=ts ...; may be repeated.",
        ),
    ] = None,
    missing: MissingOption = None,
) -> None:
    """Write a new scenario: one for your data, or a copy of a shipped one with its reward files."""
    from nonet.deploy.verbs import listing

    for line in listing.create_scenario(names, data, items, column or [], missing):
        print(line)


@app.command()
def doctor(
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, devices, Ray, compiler, memory, folders."""
    from nonet.deploy.doctor import doctor as checks

    sys.exit(checks.main(as_json))


@app.command()
def schema() -> None:
    """Print the JSON schema of scenarios, for editors."""
    from nonet.controller.scenario import Scenario

    print(json.dumps(Scenario.model_json_schema(), indent=1))


@app.command()
def parity(
    scenario: ScenarioArg,
    pools: Annotated[
        str, typer.Option(metavar="A,B", help="Two pools of the scenario, or names of devices.")
    ] = "cpu,cpu",
    precision: Annotated[
        str, typer.Option(metavar="A,B", help="fp32, bf16 or fp16 for each side.")
    ] = "fp32,fp32",
    change: SetOption = None,
    run: Annotated[
        str | None,
        typer.Option(help="Compare on this run's newest checkpoint; by default on weights trained here."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Without --run: supervised steps to train first.")] = 50,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="module, gradient, kl, overlap or metric; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the same weights, batches and seeds in two pools; exit with 1 if they differ by more than a limit."""
    from nonet.deploy.parity import compare_pools as compare
    from nonet.deploy.parity import parse_limits
    from nonet.deploy.run import api

    made = api.scenario(scenario, change)
    comparison = compare(made, pools, precision, run=run, steps=steps, limits=parse_limits(limit or []))
    print(json.dumps(comparison.as_dict(), indent=1) if as_json else comparison.to_text())
    if comparison.beyond:
        sys.exit(1)


app.add_typer(data.samples, name="samples")
app.command()(data.pack)
app.add_typer(data.store, name="store")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a bench.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, for benches that use seeds.")] = "7,8,9",
    device: Annotated[str, typer.Option(help="attention: cpu or cuda.")] = "cpu",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the bench; may be repeated."),
    ] = None,
) -> None:
    """Run a bench and print its figures; without NAME, list the benches."""
    load_heavy("nonet.bench:run_bench")(name, json_file, _parse_seeds(seeds), device, change or [])


def _parse_seeds(seeds: str) -> list[int]:
    """Parse --seeds. Raises ConfigError."""
    numbers = seeds.split(",")
    if not all(seed.strip().isdecimal() for seed in numbers):
        raise ConfigError(f"--seeds must be whole numbers such as 7,8,9, got {seeds!r}")
    return [int(seed) for seed in numbers]


def _run_seeds(
    scenario: str, seeds: list[int], changes: list[str], run_dir: Path | None, as_json: bool
) -> None:
    """Run a scenario for several seeds and print the combined result."""
    from nonet.deploy.after import format_seeds, run_seeds

    folder, pooled = run_seeds(scenario, seeds, changes, run_dir, _format_command())
    if pooled is None:
        print(f"stopped. To continue, run the same command with --run-dir {folder}", file=sys.stderr)
        sys.exit(130)
    if as_json:
        print(json.dumps(pooled, indent=1))
    else:
        print(f"{format_seeds(pooled)}\n\nreport     {folder / 'report.html'}")


def _resume_run(scenario: str, change: list[str] | None, run_dir: Path | None) -> Any:
    """Resume the run in --run-dir with a scenario. Raises ConfigError if there is no run."""
    from nonet.controller.record import RunFolder
    from nonet.deploy.run import api

    if run_dir is None:
        raise ConfigError("--resume needs --run-dir with the run's folder; or use: nonet resume RUN")
    stored = RunFolder(run_dir.absolute()).scenario
    if not stored.exists():
        raise ConfigError(f"{run_dir} has no run to resume; omit --resume to start one there")
    return api.resume(run_dir, scenario_file=api.scenario(scenario, change, stored=stored))


def _print_result(run: Any, as_json: bool) -> None:
    """Print the result of a run; exit with 130 if it was stopped."""
    from nonet.controller.record import describe_place, is_ray_job

    if is_ray_job():
        print(f"this run's folder: {describe_place(run.folder)}", file=sys.stderr)
    if run.state == "stopped":
        print(f"stopped. Continue with: nonet resume {run.folder.path}", file=sys.stderr)
        sys.exit(130)
    if as_json:
        print(json.dumps(run.report, indent=1))
    else:
        questions.print_summary(run.folder, run.folder.path / "report.html")


def _exit_with_error(error: NonetError) -> None:
    """Print an error in one line, after its traceback if the run failed, and exit with its code."""
    text = " ".join(str(error).split())
    trace = getattr(error, "traceback", "")
    if error.exit_code == 1 and trace:
        print(trace, file=sys.stderr)
    print(f"nonet: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.exit(error.exit_code)


def _format_command() -> str:
    """Return the typed command for the report, without values of env.vars; "" if it was not `nonet`."""
    from nonet.controller.scenario import hide_in_command

    return (
        shlex.join(["nonet", *hide_in_command(sys.argv[1:])])
        if os.path.basename(sys.argv[0]).startswith("nonet")
        else ""
    )
