"""The page of `nonet chaos`: what was lost, the time to recovery by kind, and each fault. The functions have no side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from nonet.deploy.report import ReportTable, TableCell, load_template

_KIND_TEXTS = {
    "kill": "killed",
    "slow": "suspended for some seconds, or delayed connections",
    "cut": "all TCP connections closed",
    "hang": "suspended until the run has replaced it",
}


def render_chaos_page(result: Mapping[str, Any]) -> str:
    """Render the page of a result of `run_chaos`.

    Returns:
        The HTML text.
    """
    faults, lost = result["faults"], result["lost"]
    late = result["times"] - len(faults)
    missed = sum(not fault["victim"] for fault in faults)
    notes = [
        f"The run ended before {late} of {result['times']} faults." if late > 0 else "",
        f"{missed} of {len(faults)} faults found no process, node or permission." if missed else "",
    ]
    return load_template("chaos.html").render(
        name=result["scenario"],
        subtitle=f"{len(faults)} faults, seed {result['seed']}",
        lost=lost,
        notes=[note for note in notes if note],
        free_stages=result["free_stages"],
        recovery=_build_recovery_table(result),
        faults=_build_fault_table(faults),
        kinds=_KIND_TEXTS,
        runs=result["runs"],
    )


def _build_recovery_table(result: Mapping[str, Any]) -> ReportTable:
    """Build the table with a row per kind and target: how many faults, and the seconds until the next new step."""
    counts = Counter(f"{fault['kind']} {fault['target']}" for fault in result["faults"])
    slowest_s = max((max(seconds) for seconds in result["recovery_s"].values()), default=0.0)
    rows: list[list[TableCell | str]] = []
    for name, count in sorted(counts.items()):
        seconds = result["recovery_s"].get(name, [])
        restarts = sum(
            fault["restarts"] for fault in result["faults"] if f"{fault['kind']} {fault['target']}" == name
        )
        times: list[TableCell | str] = (
            [
                f"{min(seconds):.1f}",
                TableCell(f"{median(seconds):.1f}", share=median(seconds) / slowest_s if slowest_s else None),
                f"{max(seconds):.1f}",
            ]
            if seconds
            else ["–", "–", "–"]
        )
        rows.append([name, str(count), str(restarts), *times])
    return ReportTable(["", "faults", "restarts", "fastest s", "median s", "slowest s"], rows)


def _build_fault_table(faults: list[dict[str, Any]]) -> ReportTable:
    """Build the table with a row per fault, in the order in which they happened."""
    rows: list[list[TableCell | str]] = [
        [
            f"{fault['kind']} {fault['target']}",
            fault["victim"].rpartition("/")[2] or "nothing",
            str(fault["hit_step"]),
            fault["moment"],
            f"{fault['duration_s']:.1f}" if fault["duration_s"] else "–",
            str(fault["restarts"]),
            "–" if fault["recovery_s"] is None else f"{fault['recovery_s']:.1f}",
        ]
        for fault in faults
    ]
    head = ["", "hit", "after step", "moment", "lasted s", "restarts", "next new step after s"]
    return ReportTable(head, rows)
