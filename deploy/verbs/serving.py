"""The verbs that serve runs: `serve`, `top`, `versions`, `publish`, `promote`, `rollback`, `export`; cli.py lists them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nonet.deploy.verbs.questions import JsonOption, RunArg
from nonet.errors import ConfigError


def serve(
    run: RunArg = "last",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="8000 by default.")] = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 by default: this machine alone.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of keys, see docs/how-to/serve.md.")
    ] = None,
    monitoring: Annotated[
        Path | None,
        typer.Option(help="Only write Grafana's dashboard and Prometheus' rules into this folder."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Only write a KubeRay RayService into this file; RUN is its path in the pods, under /runs."
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Of the manifest's pods.")] = None,
) -> None:
    """Answer requests from a run's newest version, and swap newer ones in, until Ctrl-C."""
    from nonet.deploy.serving import serve_run, write_monitoring

    if image is not None and manifest is None:
        raise ConfigError("--image is of the pods of --manifest FILE; give both, or neither")
    if manifest is not None:
        from nonet.deploy.serving import manifest_of

        print(manifest_of(manifest, run, config, image))
        return
    if monitoring is not None:
        for path in write_monitoring(monitoring, f"{host or '127.0.0.1'}:{port or 8000}"):
            print(path)
        return
    serve_run(run, host, port, config, lambda line: print(line, file=sys.stderr, flush=True))


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    times: Annotated[int | None, typer.Option(min=1, help="Looks; until Ctrl-C by default.")] = None,
) -> None:
    """Show a server live: requests, latency, queue, what is merged, fall-backs, version."""
    from nonet.deploy.serving import watch

    watch(url, every, times)


def versions(run: RunArg = "last", as_json: JsonOption = False) -> None:
    """List the published versions of a run, and which of them are served."""
    from nonet.deploy.serving import describe_versions

    rows = describe_versions(run)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows or [{"version": "none are published yet: nonet serve"}]:
        print("  ".join(str(value) for value in row.values()))


def publish(
    step: Annotated[int, typer.Option(help="Of the commit, as in RUN/checkpoints.")],
    run: RunArg = "last",
    as_json: JsonOption = False,
) -> None:
    """Make a version of a run's commit, which nobody is answered by until it is promoted."""
    from nonet.deploy.serving import publish_commit

    row = publish_commit(run, step)
    told = f"version {row['version']} is the commit after step {step}; answer by it: nonet promote {run}@{row['version']}"
    print(json.dumps(row, indent=1) if as_json else told)


def promote(
    name: Annotated[str, typer.Argument(metavar="RUN@V", help="A run and a version of it, such as last@3.")],
    share: Annotated[
        float | None, typer.Option(help="This share of the users alone, beside the version served.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer everybody, or a share of the users, by a version."""
    from nonet.deploy.serving import promote_version

    _say(promote_version(name, share), as_json)


def rollback(
    run: RunArg = "last",
    to: Annotated[
        int | None,
        typer.Option(
            help="The version to go back to. By default versions with a share are refused; without any, the one before answers."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Go back at once: versions that were served or shared, and those made from them, are refused from then on."""
    from nonet.deploy.serving import rollback_version

    _say(rollback_version(run, to), as_json)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its id, a prefix, or `last`.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    version: Annotated[int | None, typer.Option(help="The one that is served by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model, its semantic ids, trie, rows and counts into a folder that needs no Ray."""
    from nonet.deploy.serving.offline import export_run

    written = export_run(run, target, version)
    done = (
        f"{target}: version {written['version']}, {written['bytes']:,} bytes; try: python {target}/example.py"
    )
    print(json.dumps(written, indent=1) if as_json else done)


def _say(serving: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(serving, indent=1))
        return
    shares = "".join(f", {share:.1%} of users by {version}" for version, share in serving["shares"].items())
    refused = f"; refused: {', '.join(map(str, serving['refused']))}" if serving["refused"] else ""
    print(f"version {serving['default']} answers{shares}{refused}")
