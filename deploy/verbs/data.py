"""Commands about data: `items add`, `samples explain|stats`, `pack` and `store put|append|get|stats`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nonet.deploy.verbs.installed import TrustOption
from nonet.deploy.verbs.questions import JsonOption, RunArg, ScenarioArg, SetOption
from nonet.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nonet.samples.stores import Store

samples = typer.Typer(no_args_is_help=True, help="Show what stages read and what files contain.")
store = typer.Typer(no_args_is_help=True, help="Write and read stores of features.")


def add(
    run: RunArg,
    table: Annotated[
        str | None,
        typer.Argument(metavar="[ITEMS]", help="Parquet or CSV file of new items, as for data.items."),
    ] = None,
    withdraw: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="An item to withdraw; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Add a new version of a run's catalogue with new items, and without withdrawn ones."""
    from nonet.deploy.after import add_items

    record = add_items(run, table, withdraw or [])
    if as_json:
        print(json.dumps(record, indent=1))
        return
    changes = ", ".join(
        f"{record[name]:,} {name}" for name in ("added", "put back", "withdrawn") if record[name]
    )
    print(f"catalogue {record['number']} ({record['version']}): {record['items']:,} items; {changes}")
    if without := record["without"]:
        print(
            f"the new items have no {', '.join(without)}, by which others are known: has {table} these columns?"
        )


UseArg = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="FOLDER, lmdb:FOLDER, redis://HOST:PORT/NAME, hbase://HOST:PORT/TABLE."
    ),
]
RowsArg = Annotated[str, typer.Argument(metavar="SRC", help="Parquet: a path, a glob, a folder or a URI.")]
KeyOption = Annotated[str, typer.Option(help="The column of keys.")]
TimeOption = Annotated[
    str | None,
    typer.Option(
        help="The column of times; each row is a version of its key. Timestamps, or numbers in s, ms, us or ns: the "
        "unit is that in the name (updated_ms), or fits the largest value."
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A column to keep, by default all; may be repeated. HBase: NAME='family:qualifier type'.",
    ),
]
StoreOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A=B", help="Set an option; may be repeated.")
]


@samples.command()
def explain(scenario: ScenarioArg, change: SetOption = None) -> None:
    """Show what each stage of a scenario reads, in which order, and by which role."""
    from nonet.deploy.run import api, explain_samples

    print(explain_samples(api.scenario(scenario, change).scenario))


@samples.command("stats")
def show_stats(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Files: a path, a glob, a folder or a URI.")],
    form: Annotated[str | None, typer.Option("--format", help="parquet, arrow, csv or lines.")] = None,
    where: Annotated[str | None, typer.Option(help="A condition on the rows.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read files once and print rows, bad rows, a summary of each column, and rows/s."""
    from nonet.deploy.run import format_stats

    text, facts = format_stats(data, form, where)
    print(json.dumps(facts, indent=1) if as_json else text)


def pack(
    source: RowsArg,
    use: UseArg,
    key: Annotated[
        str | None,
        typer.Option(help="The column of keys."),
    ] = None,
    time: TimeOption = None,
    column: ColumnOption = None,
    option: StoreOption = None,
) -> None:
    """Write Parquet rows to a store by --key, or without --key as packed Arrow files of samples."""
    if key is None:
        if time or column or option:
            raise ConfigError("--time, --column and --set only apply to a store; give its --key")
        from nonet.samples.tables import pack_files

        files = pack_files(
            source, use, lambda done, total: print(f"{done} of {total} files", file=sys.stderr)
        )
        size_mb = sum(path.stat().st_size for path in files) / 1e6
        print(f"{use}: {len(files)} files, {size_mb:,.1f} MB; read them with format arrow")
        return
    from nonet.samples.stores import StoreFiller

    filler = StoreFiller(source, key, time, _parse_columns(column), _parse_options(option))
    _print_written_and_close(*filler.pack(use, _print_progress))


@store.command()
def put(
    use: UseArg,
    source: RowsArg,
    key: KeyOption,
    time: TimeOption = None,
    column: ColumnOption = None,
    option: StoreOption = None,
) -> None:
    """Write Parquet rows into an existing store; rows with the same key (and time) are replaced."""
    from nonet.samples.stores import StoreFiller

    columns, options = _parse_columns(column), _parse_options(option)
    filler = StoreFiller(source, key, time, columns, options)
    _print_written_and_close(*filler.put(_open_store(use, columns, options), _print_progress))


@store.command()
def append(
    run: RunArg,
    events: Annotated[
        str, typer.Argument(metavar="EVENTS", help="Table of interactions, with the run's column names.")
    ],
    store: Annotated[
        str | None,
        typer.Option(help="The store of services.features.store, by default the run's data.sequences."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Append events to the store of a run's sequences, for serving and `nonet recommend`."""
    from nonet.deploy.after import append_events

    counts = append_events(run, events, store)
    if as_json:
        print(json.dumps(counts))
        return
    print(f"appended {counts['events']:,} events of {counts['users']:,} users")
    if counts["unknown_items"]:
        print(f"left out {counts['unknown_items']:,} events of items that the run does not know")


@store.command()
def get(
    use: UseArg,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...")],
    as_of: Annotated[
        str | None,
        typer.Option(
            help="Unix seconds, or a time such as 2026-11-01T12:00 (UTC); use the newest version before it."
        ),
    ] = None,
    column: ColumnOption = None,
    option: StoreOption = None,
) -> None:
    """Print the rows of keys and the time of each version (UTC), one JSON object per line; null for a missing key."""
    from nonet.samples.stores import get_row_times, get_rows

    before = None if as_of is None else _parse_time(as_of)
    opened = _open_store(use, _parse_columns(column), _parse_options(option))
    rows, times = get_rows(opened, keys, before), get_row_times(opened, keys, before)
    for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
        line: dict[str, Any] = {"key": key}
        if times is not None and row is not None:
            line["time"] = f"{datetime.fromtimestamp(times[index], UTC):%Y-%m-%dT%H:%M:%SZ}"
        print(json.dumps({**line, "row": row}, default=str))


@store.command("stats")
def show_store_stats(use: UseArg, column: ColumnOption = None, option: StoreOption = None) -> None:
    """Print the contents of a store as JSON."""
    opened = _open_store(use, _parse_columns(column), _parse_options(option))
    columns = {field.name: str(field.type) for field in opened.schema}
    print(
        json.dumps(
            {"store": opened.name, "versions": opened.versions, "columns": columns} | opened.collect_stats(),
            indent=1,
        )
    )


def _parse_time(text: str) -> int:
    """Parse --as-of, unix seconds or an ISO 8601 time, as unix seconds. Raises ConfigError for any other text."""
    from nonet.samples.tables import convert_times

    is_number = text.removeprefix("-").isdecimal()
    try:
        return int(convert_times([int(text) if is_number else text], "s")[0])
    except DataError:
        raise ConfigError(
            f"--as-of is {text}; it must be unix seconds, or a time such as 2026-11-01T12:00"
        ) from None


def _open_store(use: str, columns: Any, options: dict[str, Any]) -> Store:
    """Open the store that `STORE` names with the columns and options of the command line."""
    from nonet.samples.stores import open_store

    return open_store(use, columns, **options)


def _parse_columns(texts: list[str] | None) -> list[str] | dict[str, str] | None:
    """Parse --column options into names or, if one of them is NAME=SOURCE, into the sources of all columns by name."""
    if not texts or not any("=" in text for text in texts):
        return texts
    source_by_name: dict[str, str] = {}
    for text in texts:
        name, _, source = text.partition("=")
        source_by_name[name] = source or name
    return source_by_name


def _parse_options(texts: list[str] | None) -> dict[str, Any]:
    """Parse --set options of a store, whose values may be JSON. Raises ConfigError if one has no `=`."""
    if wrong_text := next((text for text in texts or () if "=" not in text), None):
        raise ConfigError(f"--set must be NAME=VALUE, got {wrong_text!r}")
    options = {}
    for name, value in (text.split("=", 1) for text in texts or ()):
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _print_progress(done: int, total: int) -> None:
    """Print to standard error how many rows are done."""
    print(f"{done:,} of {total:,} rows", file=sys.stderr, flush=True)


def _print_written_and_close(store: Store, row_count: int) -> None:
    """Print the number of rows that were written, and close the store."""
    stats = store.collect_stats()
    print(f"{store.name}: wrote {row_count:,} rows; it holds {stats['keys']:,} keys")
    store.close()
