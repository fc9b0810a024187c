"""`nonet chaos SCENARIO`: run a scenario undisturbed, then with faults, and compare what both runs did.

Both runs are on as many workers, so they must agree in every bit: the files of all checkpoints, of which the ledger of samples
is one, the applied steps, and the ranks of every evaluation.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder, create_run, describe_place
from nonet.deploy.after.chaos.agents import FaultAgents
from nonet.deploy.after.chaos.connections import ENDPOINT, StorageProxy, check_endpoint, place_proxy
from nonet.deploy.after.chaos.differences import list_applied_steps, list_differences, list_free_stages
from nonet.deploy.after.chaos.faults import (
    NODE,
    STORAGE,
    Fault,
    check_targets,
    draw_faults,
    list_targets,
)
from nonet.deploy.after.chaos.injector import FaultInjector
from nonet.deploy.after.chaos.nodes import SpareNodes
from nonet.deploy.after.chaos.page import render_chaos_page
from nonet.deploy.run import Panel, ScenarioFile, api
from nonet.errors import ConfigError

_PAGE = "chaos.html"


def run_chaos(
    scenario_file: ScenarioFile,
    *,
    targets: Sequence[str] = (),
    times: int,
    seed: int,
    run_dir: Path | None = None,
    shares_cluster: bool = False,
    replaces_nodes: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run a scenario undisturbed and with faults, and compare both runs.

    Args:
        scenario_file: The scenario.
        targets: What is hit (`faults.KINDS_BY_TARGET`), by default all roles of the run, its controller, and the storage of a run
            in object storage if a proxy can be placed before it.
        times: The number of faults.
        seed: The seed of their schedule.
        run_dir: The folder of the result, and of both runs unless they are in object storage; by default a new one.
        shares_cluster: Whether faults are allowed on a cluster that has other runs.
        replaces_nodes: Whether the cluster replaces nodes that it has lost.
        report: Called with a line per fault.

    Returns:
        "faults": what was done, with the seconds of recovery; "times": how many faults were planned; "lost": differences between
        the runs, one text each, or that no fault hit anything; empty if nothing was lost; "free_stages": the stages whose bits
        cannot be reproduced; "recovery_s": the seconds by "kind target"; "runs": the places of the runs; "page": the page.

    Raises:
        ConfigError: A target is none that the run has, there are too many faults, or the cluster has other runs.
        NonetError: A run failed.
    """
    targets = targets or _choose_targets(scenario_file)
    check_targets(targets, list_targets(scenario_file.scenario))
    is_stored = scenario_file.scenario.storage is not None
    if STORAGE in targets:
        if not is_stored:
            raise ConfigError("--kill storage needs a run in object storage, and the scenario has no storage")
        check_endpoint()
    if not shares_cluster:
        check_unshared()
    nodes = SpareNodes(scenario_file.scenario, replaces=replaces_nodes) if NODE in targets else None
    folder = (run_dir or create_run(f"{scenario_file.scenario.name}-chaos").path).absolute()
    make_folder(folder)
    with ExitStack() as stack:
        proxy = _place_proxy(stack) if STORAGE in targets else None
        began = time.monotonic()
        calm = _start(scenario_file, folder / f"{folder.name}-undisturbed")
        with Panel() as panel:
            calm.wait(panel)
        faults = _draw_faults(
            scenario_file, targets, times, seed, list_applied_steps(calm.folder), time.monotonic() - began
        )
        agents = stack.enter_context(FaultAgents())
        disturbed = _start(scenario_file, folder / f"{folder.name}-disturbed")
        choose_node = {"choose_node": nodes.choose} if nodes else {}
        injector = FaultInjector(disturbed.folder, faults, agents, report, proxy, **choose_node)
        with injector, Panel() as panel:
            disturbed.wait(panel)
        free_stages = list_free_stages(scenario_file.scenario)
        lost = list_differences(calm.folder, disturbed.folder, free_stages)
        if not any(fault.victim for fault in injector.done):
            lost.append("no fault hit anything, so the runs do not show what a fault does")
    seconds_by_fault: dict[str, list[float]] = {}
    for fault in injector.done:
        if fault.recovery_s is not None:
            seconds_by_fault.setdefault(fault.name, []).append(fault.recovery_s)
    result = {
        "scenario": scenario_file.scenario.name,
        "seed": seed,
        "faults": [asdict(fault) for fault in injector.done],
        "times": times,
        "lost": lost,
        "free_stages": free_stages,
        "recovery_s": dict(sorted(seconds_by_fault.items())),
        "runs": [describe_place(run.folder) for run in (calm, disturbed)],
        "page": str(folder / _PAGE),
    }
    RunFolder(folder).write_json("chaos.json", result)
    write_whole(folder / _PAGE, render_chaos_page(result).encode())
    return result


def _choose_targets(scenario_file: ScenarioFile) -> list[str]:
    """Return the default targets: the roles of the run, its controller, and the storage if a proxy can be placed before it."""
    has_proxy = scenario_file.scenario.storage is not None and os.environ.get(ENDPOINT, "").startswith(
        "http://"
    )
    left_out = {NODE} if has_proxy else {NODE, STORAGE}
    return [target for target in list_targets(scenario_file.scenario) if target not in left_out]


def _start(scenario_file: ScenarioFile, folder: Path) -> Any:
    """Start a run in a folder, or in the object storage of the scenario."""
    return api.start(scenario_file, run_dir=None if scenario_file.scenario.storage else folder)


def _place_proxy(stack: ExitStack) -> StorageProxy:
    """Place a proxy before the object storage, which the processes of the cluster use too."""
    import ray

    from nonet.workers.runtime import ensure_ray

    is_local = os.environ.get("RAY_ADDRESS", "local") == "local"
    if not is_local and not ray.is_initialized():
        ensure_ray()
    host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
    if (
        ray.is_initialized()
    ):  # processes of a cluster get the endpoint with the job, whose environment is set at its start
        ray.shutdown()
    proxy = stack.enter_context(place_proxy(host))
    ensure_ray(variables={} if is_local else {ENDPOINT: os.environ[ENDPOINT]})
    stack.callback(ray.shutdown)  # no later run may use the proxy
    return proxy


def _draw_faults(
    scenario_file: ScenarioFile,
    targets: Sequence[str],
    times: int,
    seed: int,
    steps: Sequence[tuple[int, str]],
    seconds: float,
) -> list[Fault]:
    """Draw the faults of a run that does the steps (global step, stage) of an undisturbed one, which took some seconds."""
    stages = scenario_file.scenario.stages
    publishing_steps = {step + 1 for step, stage in steps if stages[stage].kind.rolls_out}
    return draw_faults(targets, times, seed, len(steps), seconds / max(1, len(steps)), publishing_steps)


def check_unshared() -> None:
    """Check that the cluster that RAY_ADDRESS names has no other run.

    Raises:
        ConfigError: It has one.
    """
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        return
    from nonet.controller.groups import list_controlled_runs
    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    if run_ids := sorted(list_controlled_runs()):
        raise ConfigError(
            f"chaos: the cluster is used by {run_ids[0]}; use another one, or allow faults beside "
            "other runs with --shared"
        )


def format_chaos(result: Mapping[str, Any]) -> str:
    """Format the result of `run_chaos`: faults by kind, recovery, and what was lost."""
    counts = Counter(f"{fault['kind']} {fault['target']}" for fault in result["faults"])
    lines = [f"{'fault':<18}  {'times':>5}  {'restarts':>8}  {'next step after':>15}"]
    for name, count in sorted(counts.items()):
        seconds = result["recovery_s"].get(name)
        restarts = sum(
            fault["restarts"] for fault in result["faults"] if f"{fault['kind']} {fault['target']}" == name
        )
        shown = "-" if seconds is None else f"{median(seconds):.1f} s"
        lines.append(f"{name:<18}  {count:>5}  {restarts:>8}  {shown:>15}")
    if (late := result["times"] - len(result["faults"])) > 0:
        lines += ["", f"the run ended before {late} of {result['times']} faults"]
    if missed := sum(not fault["victim"] for fault in result["faults"]):
        lines += ["", f"{missed} of {len(result['faults'])} faults hit nothing"]
    if result["free_stages"]:
        stages = ", ".join(result["free_stages"])
        lines += [
            "",
            f"bits of {stages} cannot be reproduced with staleness; steps, prompt groups and versions are compared",
        ]
    lines += ["", *(result["lost"] or ["nothing was lost, doubled or computed otherwise"])]
    return "\n".join([*lines, "", f"page  {result['page']}"])
