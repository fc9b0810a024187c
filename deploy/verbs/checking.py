"""The commands that check and measure: `doctor`, `parity`, `chaos` and `bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from nonet.deploy.verbs.questions import JsonOption, ScenarioArg, SetOption, refuse_address
from nonet.deploy.verbs.running import parse_seeds
from nonet.plugins import load_heavy


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, devices, Ray, compiler, memory, folders."""
    from nonet.deploy.doctor import doctor as doctor_module

    sys.exit(doctor_module.main(as_json))


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
        typer.Option(help="Compare the newest checkpoint of this run; by default, train weights first."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Number of supervised steps to train without --run.")
    ] = 50,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="module, gradient, kl, overlap or metric; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the same weights, batches and seeds in two pools; exit with 1 if they differ by more than a limit."""
    from nonet.deploy.parity import compare_pools, parse_limits
    from nonet.deploy.run import api

    scenario_file, limits = api.scenario(scenario, change), parse_limits(limit or [])
    comparison = compare_pools(scenario_file, pools, precision, run=run, steps=steps, limits=limits)
    print(json.dumps(comparison.as_dict(), indent=1) if as_json else comparison.to_text())
    if comparison.beyond:
        sys.exit(1)


def chaos(
    scenario: ScenarioArg,
    kill: Annotated[
        str,
        typer.Option(
            metavar="TARGET,TARGET",
            help="Whose processes are hit: rollout, trainer, reward, embedding, evaluator, controller; node kills a whole node, "
            "storage disturbs the connections to object storage. By default all that the run has, except node.",
        ),
    ] = "",
    times: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the steps and processes.")] = 7,
    change: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_address,
            help="The folder of the page, and of both runs without storage; by default a new one in $NONET_RUNS.",
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Allow faults on a cluster that has other runs.")
    ] = False,
    nodes_return: Annotated[
        bool,
        typer.Option("--nodes-return", help="The cluster replaces lost nodes, so --kill node may hit any."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario undisturbed and with faults, and compare both; exit with 1 if they differ or no fault hit anything.

    A fault kills a process, suspends it for some seconds or for good, or closes its connections, after a step or during a save or
    a publication. Set checkpoint.every so that a run writes several checkpoints.
    """
    from nonet.deploy.after.chaos import format_chaos, run_chaos
    from nonet.deploy.run import api

    result = run_chaos(
        api.scenario(scenario, change),
        targets=[target.strip() for target in kill.split(",") if target.strip()],
        times=times,
        seed=seed,
        run_dir=run_dir,
        shares_cluster=shared,
        replaces_nodes=nodes_return,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(result, indent=1) if as_json else format_chaos(result))
    if result["lost"]:
        sys.exit(1)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, for benches that use seeds.")] = "7,8,9",
    device: Annotated[str, typer.Option(help="attention: cpu or cuda.")] = "cpu",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set an option; may be repeated."),
    ] = None,
) -> None:
    """Run the bench NAME and print its figures; without NAME, list the benches."""
    load_heavy("nonet.bench:run_bench")(name, json_file, parse_seeds(seeds), device, change or [])
