"""The commands before a first run: `import`, `scenarios`, `new`, `schema` and `manifest`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from nonet.deploy.verbs.questions import ColumnOption, JsonOption, ScenarioArg, SetOption

ItemsOption = Annotated[Path | None, typer.Option(help="The file of items.")]
MissingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--missing",
        metavar="TEXT",
        help="A text that means a missing value, instead of NA, null ...; '' for an empty text; may be repeated.",
    ),
]


def import_(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="movielens, csv or sequences.")],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The file or folder to convert.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for interactions.parquet and items.parquet.")
    ],
    column: ColumnOption = None,
    items: ItemsOption = None,
    missing: MissingOption = None,
) -> None:
    """Convert another format to the two Parquet tables."""
    from nonet.deploy.verbs.listing import import_tables

    notes: list[str] = []
    counts = import_tables(form, source, target, column or [], items, notes, missing)
    for note in notes:
        print(f"note: {note}")
    print(f"{target}: " + ", ".join(f"{value} {name}" for name, value in counts.items()))


def scenarios(as_json: JsonOption = False) -> None:
    """List the shipped scenarios."""
    from nonet.deploy.verbs.listing import describe_scenarios

    rows = describe_scenarios()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:<16} {row['about']}")


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
    items: ItemsOption = None,
    column: ColumnOption = None,
    missing: MissingOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="With --data: a condition that says which events are clicks, such as 'clicked == 1', for the scenario of a "
            "click model."
        ),
    ] = None,
) -> None:
    """Write a new scenario: one for your data, or a copy of a shipped one with its reward files."""
    from nonet.deploy.verbs.listing import create_scenario

    for line in create_scenario(names, data, items, column or [], missing, target):
        print(line)


def schema() -> None:
    """Print the JSON schema of scenarios, for editors."""
    from nonet.controller.scenario import make_schema

    print(json.dumps(make_schema(), indent=1))


def manifest(
    scenario: ScenarioArg,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="kuberay, slurm, containers, compose or monitoring; by default all; may be repeated.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of containers, by default a placeholder per device.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(help="Queue of Kueue, volcano:QUEUE for one of Volcano, or partition of Slurm."),
    ] = None,
    change: SetOption = None,
) -> None:
    """Write files that run a scenario on Kubernetes or Slurm, build its images, and monitor its runs."""
    from nonet.deploy.run.manifests import write_manifests

    paths, left_out = write_manifests(scenario, target, form, changes=change, image=image, queue=queue)
    for path in paths:
        print(path)
    for reason in left_out:
        print(reason, file=sys.stderr)
