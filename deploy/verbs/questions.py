"""The commands that read finished runs: `runs`, `report`, `evaluate`, `recommend` and `tradeoff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from nonet.errors import ConfigError
from nonet.storage import is_storage_address
from nonet.suggest import make_printable

ScenarioArg = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A .yaml file, or the name of a shipped scenario.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a key of the scenario; may be repeated."),
]
RunArg = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its id, a unique prefix, or `last`.")
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="ROLE=NAME",
        help="Name of a column: user=uid, item=sku, time=ts ...; may be repeated.",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_API_SERVER_ADDRESS",
        help="URL of the dashboard of a cluster, such as http://127.0.0.1:8265.",
    ),
]


def refuse_address(folder: Path | None) -> Path | None:
    """Return the folder of --run-dir unchanged. Raises ConfigError for an address of object storage."""
    if folder is not None and is_storage_address(str(folder).replace(":/", "://", 1)):
        raise ConfigError(
            f"--run-dir is {folder}, but it must be a folder; runs are kept in object storage by --set storage=ADDRESS"
        )
    return folder


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def name_on_cluster(run: str) -> str:
    """Return the id of a run that may be named by its place in object storage, such as s3://bucket/runs/ID."""
    return run.rstrip("/").rpartition("/")[2] if is_storage_address(run) else run


def runs(
    place: Annotated[
        str | None,
        typer.Argument(metavar="s3://BUCKET/FOLDER", help="Object storage, by default runs of this machine."),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs, oldest first, with the metrics of their last stage; on a cluster, with their jobs."""
    from nonet.deploy.verbs.listing import describe_runs, format_runs

    if place is not None and not is_storage_address(place):
        raise ConfigError(
            f"runs takes the address of an object storage, such as s3://bucket/runs, got {place!r}"
        )
    if address and place is None:
        from nonet.deploy.run.jobs import ClusterClient, describe_cluster_runs

        rows = describe_cluster_runs(ClusterClient(address))
    else:
        rows = describe_runs(place)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        verb = "submit" if address and place is None else "run"
        print(format_runs(rows) if rows else f"no runs yet: nonet {verb} quickstart")


def report(
    run: RunArg = "last",
    compare: Annotated[
        str | None, typer.Option(metavar="RUN", help="Compare with this run on the same test events.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="With --compare: the stage or baseline of the first run; by default its last stage."
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="STAGE",
            help="With --compare: the stage or baseline of the other run; by default its last stage.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a run's verdict and the path of its report, or compare two runs."""
    if compare is not None:
        from nonet.deploy.after import compare_runs, format_comparison

        comparison = compare_runs(run, compare, stage_a=stage, stage_b=other)
        print(json.dumps(comparison, indent=1) if as_json else make_printable(format_comparison(comparison)))
        return
    if stage is not None or other is not None:
        raise ConfigError("--stage and --with only apply to two runs; name the other one with --compare RUN")
    from nonet.controller.record import find_group, find_run
    from nonet.deploy.report import write_report
    from nonet.storage import find_page_folder

    if group := find_group(run):
        result, text = read_group(group)
        print(json.dumps(result, indent=1) if as_json else make_printable(text))
        return
    folder = find_run(run)
    page = write_report(folder.path, find_page_folder(folder.path))
    if as_json:
        print(json.dumps(folder.read_json("report.json"), indent=1))
    else:
        print_summary(folder, page)


def evaluate(
    run: RunArg = "last",
    data: Annotated[
        str | None,
        typer.Option(
            help="Table of events to evaluate on instead of the run's: a file, folder, pattern or address as data.interactions "
            "takes it. Users may be new; items must be known."
        ),
    ] = None,
    column: ColumnOption = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Metrics to compute instead of the run's, such as recall@20,mrr@10."
        ),
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Only evaluate this stage; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's checkpoints again without training, with other metrics or for other users."""
    from nonet.deploy.after import evaluate_run, format_evaluation
    from nonet.deploy.verbs.listing import parse_roles

    metric_names = None if metrics is None else [name.strip() for name in metrics.split(",")]
    evaluation = evaluate_run(
        run, data=data, columns=parse_roles(column or []), metrics=metric_names, stages=stage
    )
    print(json.dumps(evaluation, indent=1) if as_json else format_evaluation(evaluation))


def show_sids(
    run: RunArg = "last",
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run's semantic ids are like: how codes are used, and what shares a prefix."""
    from nonet.atomic import write_whole
    from nonet.deploy.after import describe_sids, format_sids, render_sids
    from nonet.deploy.opened import OpenedRun

    opened = OpenedRun.open(run, verb="sids")
    facts = describe_sids(opened)
    if html is not None:
        write_whole(html, render_sids(facts, opened.corpus).encode())
    print(json.dumps(facts, indent=1) if as_json else format_sids(facts))
    if html is not None and not as_json:
        print(f"\npage       {html}")


def recommend(
    run: RunArg = "last",
    like: Annotated[
        list[str] | None, typer.Option(help="Title, or part of one, that the user liked; may be repeated.")
    ] = None,
    items: Annotated[
        list[str] | None, typer.Option(help="Id of an item that the user liked; may be repeated.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Id of a user of the data.")] = None,
    top: Annotated[int, typer.Option(min=1, max=100, help="Number of items per list.")] = 10,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[TITLE]...", help="More titles, as for --like.")
    ] = None,
    users: Annotated[
        Path | None,
        typer.Option(
            help="Table with the run's column of users, or `all`; the served version recommends for these users into --out."
        ),
    ] = None,
    column: ColumnOption = None,
    out: Annotated[Path | None, typer.Option(help="With --users: the Parquet file to write.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --users: number of processes, by default one per CPU.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend items for one user by every stage of a run and by two baselines, or for a table of users."""
    if items and more:  # ids after the first one, as in --items ID ID
        items, more = [*items, *more], None
    if users is not None or out is not None:
        if user is not None or like or more or items:
            raise ConfigError("--users recommends for a whole table; omit --user, --items, --like and titles")
        _recommend_all(run, users, column or [], out, top, workers, as_json)
        return
    if workers is not None or column:
        name = "--column" if column else "--workers"
        raise ConfigError(f"{name} only applies to --users U.parquet; omit it")
    from nonet.deploy.after import format_columns, recommend_for

    recommendations = recommend_for(run, [*(like or ()), *(more or ())], user, top, items or ())
    print(
        json.dumps(recommendations, indent=1, ensure_ascii=False)
        if as_json
        else format_columns(recommendations)
    )


def _recommend_all(
    run: str,
    users: Path | None,
    columns: list[str],
    out: Path | None,
    top: int,
    workers: int | None,
    as_json: bool,
) -> None:
    """Recommend for a table of users and print the counts."""
    from nonet.deploy.serving.offline import recommend_all
    from nonet.deploy.verbs.listing import parse_roles

    if users is None or out is None:
        raise ConfigError("--users U.parquet and --out R.parquet must be given together")
    result = recommend_all(run, users, out, top, workers, columns=parse_roles(columns))
    print(
        json.dumps(result, indent=1)
        if as_json
        else f"{result['file']}: {result['users']:,} users by version {result['version']}"
    )


def score(
    run: RunArg,
    data: Annotated[
        Path,
        typer.Option(
            help="Parquet or CSV file of rows to score: a user, an item and a time, in the columns of the run's log, and "
            "other columns of it that a click model reads."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Parquet file to write: the user, the item, the time and the score of each row, in order."
        ),
    ],
    column: ColumnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the item of each row of a table for its user, as of the row's time; by a click model as a probability."""
    from nonet.deploy.serving.offline import score_rows
    from nonet.deploy.verbs.listing import parse_roles

    result = score_rows(run, data, out, parse_roles(column or []))
    unknown = f", {result['unknown_items']:,} of unknown items" if result["unknown_items"] else ""
    text = f"{result['file']}: {result['rows']:,} rows{unknown}, by version {result['version']}"
    print(json.dumps(result, indent=1) if as_json else text)


def read_group(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the result of a folder of several runs, as JSON has it and as text.

    Raises:
        ConfigError: The command that started the runs has not finished.
    """
    from nonet.controller.record import RunFolder, list_grouped_runs, name_run
    from nonet.deploy.after import format_curve, format_seeds
    from nonet.deploy.after.board import format_board, read_board
    from nonet.deploy.tune import format_search_result

    record = RunFolder(folder)
    page = f"report     {folder / 'report.html'}"
    if (seeds := record.read_json("seeds.json")) is not None:
        return seeds, f"{format_seeds(seeds)}\n\n{page}"
    if (curve := record.read_json("tradeoff.json")) is not None:
        return curve, f"{format_curve(curve)}\n{folder / 'report.html'}"
    if (folder / "board.json").exists():
        board = read_board(folder)
        return board, format_board(board, folder)
    search = record.read_json("tune.json")
    if search and search.get("best"):
        paths = {"folder": folder, "scenario": folder / "best.yaml", "picture": folder / "tune.svg"}
        search |= {name: str(path) for name, path in paths.items()}
        return search, format_search_result(search)
    runs = list_grouped_runs(folder)
    finished = sum(run.report.exists() for run in runs)
    raise ConfigError(
        f"{folder} has no combined result yet: {finished} of its {len(runs)} runs are finished. Continue with: "
        f"nonet resume {folder}; or name one run: {', '.join(map(name_run, runs[-3:]))}"
    )


def print_summary(run: Any, page: Path) -> None:
    """Print the summary of a run (a `RunFolder`), the path of its page, and a suggested command."""
    from nonet.atomic import refuse_damage
    from nonet.deploy.report import format_summary, suggest_command
    from nonet.storage import read_address

    with refuse_damage(run.report):
        print(make_printable(format_summary(run.read_json("report.json"))))
    print(f"\nreport     {page}")
    if address := read_address(run.path):
        print(f"stored     {address}")
    if command := suggest_command(run):
        print(f"recommend  {command}")


def tradeoff(
    run: RunArg,
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="KEY=A,B,C", help="stages.<stage>.rewards.<name>.weight (or at_least) and its values."
        ),
    ],
    least: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the validation metric before the stage that the chosen point must keep.",
        ),
    ] = 0.98,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_address, help="Folder of the runs, one per value; finished runs are not repeated."
        ),
    ] = None,
    change: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Repeat a run's RL stage for several values of a reward's weight or minimum, and choose one by validation."""
    from nonet.deploy.after import format_curve, run_tradeoff

    folder, curve = run_tradeoff(run, sweep, run_dir=run_dir, min_metric_share=least, changes=change or [])
    print(json.dumps(curve, indent=1) if as_json else f"{format_curve(curve)}\n{folder / 'report.html'}")
