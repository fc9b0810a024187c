"""`nonet chaos SCENARIO`: run a scenario undisturbed, then with faults, and compare what both runs did.

Both runs are on as many workers, so they must agree in every bit: the files of all checkpoints, of which the ledger of samples
is one, the applied steps, and the ranks of every evaluation.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from nonet.atomic import make_folder
from nonet.controller.record import RunFolder, create_run, read_journal
from nonet.deploy.after.faults import FaultInjector, count_applied_steps, draw_faults
from nonet.deploy.run import ScenarioFile, api
from nonet.errors import ConfigError


def run_chaos(
    scenario_file: ScenarioFile,
    *,
    roles: Sequence[str],
    times: int,
    seed: int,
    run_dir: Path | None = None,
    shares_cluster: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run a scenario undisturbed and with faults, and compare both runs.

    Args:
        scenario_file: The scenario.
        roles: The roles whose processes are hit (`faults.ROLES`).
        times: The number of faults.
        seed: The seed of their schedule.
        run_dir: The folder of both runs, by default a new one.
        shares_cluster: Whether faults are allowed on a cluster that has other runs.
        report: Called with a line per fault.

    Returns:
        "faults": what was done, with the seconds of recovery; "times": how many faults were planned; "lost": differences between
        the runs, one text each, empty if there are none; "recovery_s": the median by "kind role"; "runs": the folders.

    Raises:
        ConfigError: A role is unknown, there are too many faults, the cluster has other runs, or the scenario has `storage`.
        NonetError: A run failed.
    """
    if scenario_file.scenario.storage is not None:
        raise ConfigError("chaos: both runs are compared in folders; set storage=null, or leave storage out")
    draw_faults(roles, 0, seed, 1, 0.0)  # checks the roles before anything runs
    if not shares_cluster:
        check_unshared()
    folder = run_dir or create_run(f"{scenario_file.scenario.name}-chaos").path
    make_folder(folder)
    began = time.monotonic()
    calm = api.run(scenario_file, run_dir=folder / f"{folder.name}-undisturbed").folder
    steps = count_applied_steps(calm)
    faults = draw_faults(roles, times, seed, steps, (time.monotonic() - began) / max(1, steps))
    disturbed = RunFolder(folder.absolute() / f"{folder.name}-disturbed")
    with FaultInjector(disturbed, faults, report) as injector:
        api.run(scenario_file, run_dir=disturbed.path)
    seconds_by_kind: dict[str, list[float]] = {}
    for fault in injector.done:
        if fault.recovery_s is not None:
            seconds_by_kind.setdefault(f"{fault.kind} {fault.role}", []).append(fault.recovery_s)
    result = {
        "faults": [asdict(fault) for fault in injector.done],
        "times": times,
        "lost": list_differences(calm, disturbed),
        "recovery_s": {kind: round(median(seconds), 2) for kind, seconds in sorted(seconds_by_kind.items())},
        "runs": [str(calm.path), str(disturbed.path)],
    }
    RunFolder(folder).write_json("chaos.json", result)
    return result


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


def list_differences(calm: RunFolder, disturbed: RunFolder) -> list[str]:
    """Compare a disturbed run with an undisturbed one.

    Returns:
        One text per checkpoint file, step or evaluation that is missing, doubled or different.
    """
    differences: list[str] = []
    expected, actual = _read_checkpoints(calm), _read_checkpoints(disturbed)
    for step in sorted(expected.keys() | actual.keys()):
        if step not in actual or step not in expected:
            differences.append(
                f"checkpoint {step}: only in the {'disturbed' if step in actual else 'undisturbed'} run"
            )
            continue
        for key, value in expected[step].items():
            if actual[step].get(key) != value:
                differences.append(f"checkpoint {step}: {key} differs")
    for run, name in ((calm, "undisturbed"), (disturbed, "disturbed")):
        counts = Counter(record["applied"] for record in read_journal(run.journal) if "applied" in record)
        differences += [
            f"step {step}: applied {count} times in the {name} run"
            for step, count in counts.items()
            if count > 1
        ]
    if (steps := _list_applied(calm)) != (others := _list_applied(disturbed)):
        differences.append(
            f"journal: {len(steps)} steps undisturbed, {len(others)} disturbed, or in another order"
        )
    expected_ranks, actual_ranks = _hash_ranks(calm), _hash_ranks(disturbed)
    for name in sorted(expected_ranks.keys() | actual_ranks.keys()):
        if expected_ranks.get(name) != actual_ranks.get(name):
            differences.append(f"ranks of {name} differ")
    return differences


def format_chaos(result: dict[str, Any]) -> str:
    """Format the result of `run_chaos`: faults by kind, recovery, and what was lost."""
    counts = Counter(f"{'hang' if fault['hang_s'] else 'kill'} {fault['role']}" for fault in result["faults"])
    lines = [f"{'fault':<18}  {'times':>5}  {'next step after':>15}"]
    for kind, count in sorted(counts.items()):
        seconds = result["recovery_s"].get(kind)
        lines.append(f"{kind:<18}  {count:>5}  {'-' if seconds is None else f'{seconds:.1f} s':>15}")
    if (late := result["times"] - len(result["faults"])) > 0:
        lines += ["", f"the run ended before {late} of {result['times']} faults"]
    lost = result["lost"]
    lines += ["", *lost] if lost else ["", "nothing was lost, doubled or computed otherwise"]
    return "\n".join(lines)


def _read_checkpoints(run: RunFolder) -> dict[int, dict[str, Any]]:
    """Return what must be equal of each checkpoint, by global step: its place in the run, and the hashes of its files.

    Numbers of versions are not: a stage that is resumed publishes its weights once more, under the next number.
    """
    checkpoints: dict[int, dict[str, Any]] = {}
    for path in run.checkpoints.glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: manifest[key] for key in ("stage", "stage_step", "last", "artifacts")}
        checkpoints[manifest["step"]] = kept | manifest["files"]
    return checkpoints


def _list_applied(run: RunFolder) -> list[tuple[int, str]]:
    """Return (global step, stage) of the applied steps of a run, in the order of its journal."""
    return [
        (record["applied"], record["stage"]) for record in read_journal(run.journal) if "applied" in record
    ]


def _hash_ranks(run: RunFolder) -> dict[str, str]:
    """Return the SHA-256 of the ranks of each subject that was evaluated, by its name."""
    files = [path for path in run.results.glob("*.npz") if ".valid." not in path.name]
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
