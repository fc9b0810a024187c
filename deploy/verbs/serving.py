"""The commands that serve runs: `serve`, `top`, `versions`, `publish`, `promote`, `rollback`, `export`."""

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
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on, by default 8000.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Host to listen on, by default 127.0.0.1 (this machine only).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings, see docs/how-to/serve.md.")
    ] = None,
    monitoring: Annotated[
        Path | None,
        typer.Option(help="Only write a Grafana dashboard and Prometheus rules into this folder."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="Only write a KubeRay RayService into this file; RUN is a path in the pods, under /runs."
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="--manifest: image of the pods.")] = None,
) -> None:
    """Serve a run's newest version, and swap in newer ones, until Ctrl-C."""
    from nonet.deploy.run.manifests import write_monitoring
    from nonet.deploy.serving import serve_run

    if image is not None and manifest is None:
        raise ConfigError("--image only applies to --manifest FILE; give both, or neither")
    if manifest is not None:
        from nonet.deploy.serving import write_run_manifest

        print(write_run_manifest(manifest, run, config, image))
        return
    if monitoring is not None:
        for path in write_monitoring(monitoring, f"{host or '127.0.0.1'}:{port or 8000}"):
            print(path)
        return
    serve_run(run, host, port, config, lambda line: print(line, file=sys.stderr, flush=True))


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    times: Annotated[
        int | None, typer.Option(min=1, help="Number of updates, by default until Ctrl-C.")
    ] = None,
) -> None:
    """Show a server live: requests, latency, queue, batch size, fallbacks, version."""
    from nonet.deploy.serving import watch_server

    watch_server(url, every, times)


def versions(run: RunArg = "last", as_json: JsonOption = False) -> None:
    """List the published versions of a run and which of them are served."""
    from nonet.deploy.serving import describe_versions
    from nonet.deploy.verbs.listing import format_versions

    rows = describe_versions(run)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print(format_versions(rows) if rows else "no version is published yet: nonet serve")


def publish(
    step: Annotated[int, typer.Option(help="Step of the checkpoint, as in RUN/checkpoints.")],
    run: RunArg = "last",
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint of a run as a version, which receives no traffic until it is promoted."""
    from nonet.deploy.serving import publish_checkpoint

    row = publish_checkpoint(run, step)
    text = f"version {row['version']} is the checkpoint of step {step}; serve it with: nonet promote {run}@{row['version']}"
    print(json.dumps(row, indent=1) if as_json else text)


def promote(
    name: Annotated[str, typer.Argument(metavar="RUN@V", help="A run and a version of it, such as last@3.")],
    share: Annotated[float | None, typer.Option(help="Share of the users, by default all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Direct all traffic, or a share of the users, to a version."""
    from nonet.deploy.serving import promote_version

    _print_state(promote_version(name, share), as_json)


def rollback(
    run: RunArg = "last",
    to: Annotated[
        int | None,
        typer.Option(
            help="Version to serve; by default the served one if another version has a share, else the one before it."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an earlier version, and refuse the versions that this replaces."""
    from nonet.deploy.serving import rollback_version

    _print_state(rollback_version(run, to), as_json)


def export(
    run: RunArg,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    version: Annotated[int | None, typer.Option(help="Version to export, by default the served one.")] = None,
    form: Annotated[
        str,
        typer.Option(metavar="NAME", help="Exporter: folder, file.py:NAME or package.module:NAME."),
    ] = "folder",
    as_json: JsonOption = False,
) -> None:
    """Write a model, its semantic ids, trie, rows and counts into a folder that needs no Ray."""
    from nonet.deploy.serving.offline import export_run

    result = export_run(run, target, version, form)
    text = f"{target}: version {result['version']}, {result['bytes']:,} bytes"
    if (target / "example.py").exists():
        text += f"; try: python {target}/example.py"
    print(json.dumps(result, indent=1) if as_json else text)


def _print_state(serving: dict[str, Any], as_json: bool) -> None:
    """Print a serving state: the default version, the shares of others, and refused versions."""
    if as_json:
        print(json.dumps(serving, indent=1))
        return
    shares = "".join(f", {share:.1%} of users by {version}" for version, share in serving["shares"].items())
    refused = f"; refused: {', '.join(map(str, serving['refused']))}" if serving["refused"] else ""
    print(f"serving version {serving['default']}{shares}{refused}")
