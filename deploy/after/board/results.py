"""The results of a board, from the folders of its runs."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet import yaml
from nonet.controller.record import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.deploy.after import TestedRun, get_seed_dir
from nonet.deploy.after.board.entries import BoardEntry
from nonet.models.ranking import compare_paired, compute_per_event

SMALL_SET = 5000  # sets with fewer test events are also compared together
_SIZES = ("users", "items", "events")

# Shapes: P test events of one set, N test events of all small sets.


def collect_entry(
    entry: BoardEntry, folder: Path, pooled: Mapping[str, Any], runs: Sequence[RunFolder]
) -> dict[str, Any]:
    """Collect the results of an entry from its finished runs.

    Args:
        entry: The entry.
        folder: The board's folder.
        pooled: The combined result of the runs (`combine_seeds`).
        runs: The runs, one for each seed.

    Returns:
        JSON: the entry, the combined result, sizes of the data, published results for the same data, means of scores with
        ties shuffled and of the model alone, time and memory, and the report's parts on segments and memory of the first run.
    """
    reports = [run.read_json("report.json") for run in runs]
    first = reports[0]
    sizes = {key: first["data"][key] for key in _SIZES}
    own, others = find_published(sizes, entry.protocol)
    return {
        **pooled,
        **entry.model_dump(),
        "scenario": entry.get_scenario(folder),
        "data": sizes,
        "published": own,
        "published_otherwise": others,
        "shuffled": _average_scores(reports, "shuffled", "exhaustive"),
        "alone": _average_scores(reports, "test", "model alone"),
        "trained": first.get("trained") or {},
        "report": {
            key: first.get(key)
            for key in ("detail", "segments", "baselines", "stages", "paired", "data", "memory", "cold")
        },
        "seconds": [report["wall_s"].get("total", 0.0) for report in reports],
        "peak_bytes": max(report["peak_rss_bytes"] for report in reports),
        "processors": sorted({report.get("processor") or "unknown" for report in reports}),
        "versions": first["versions"],
    }


def _average_scores(
    reports: Sequence[Mapping[str, Any]], split: str, search: str
) -> dict[str, dict[str, float]]:
    """Return the mean over runs of each subject's scores of one kind, by metric; subjects without them are left out."""
    scores: dict[str, dict[str, list[float]]] = {}
    for report in reports:
        for subject, detail in report["detail"].items():
            for metric, value in detail.get(split, {}).get(search, {}).get("all", {}).items():
                scores.setdefault(subject, {}).setdefault(metric, []).append(value)
    return {
        subject: {metric: float(np.mean(values)) for metric, values in by_metric.items()}
        for subject, by_metric in scores.items()
    }


def find_published(
    sizes: Mapping[str, int], protocol: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return published results for data of these sizes: those by the same protocol, and those by others.

    The data are recognised by their numbers of users, items and events.
    """
    text = (importlib.resources.files("nonet.deploy.after.board") / "published.yaml").read_text(
        encoding="utf-8"
    )
    rows = [
        row
        for part in yaml.parse(text, "published.yaml").values()
        if all(part[key] == sizes[key] for key in _SIZES)
        for row in part["rows"]
    ]
    same = [row for row in rows if row.get("protocol", "last") == protocol]
    return same, [row for row in rows if row not in same]


def compare_small_sets(
    entries: Mapping[str, Mapping[str, Any]], folder: Path, metrics: Sequence[str]
) -> dict[str, Any]:
    """Compare the last stages with each baseline over all sets with fewer than `SMALL_SET` test events together.

    Args:
        entries: The results of the entries by key.
        folder: The board's folder.
        metrics: The metrics.

    Returns:
        {"sets": keys, "events": number of test events, "paired": {baseline: {metric: {diff, low, high}}}} of the baselines that
        all these sets have; empty if there are fewer than two such sets. Of a data set with several protocols, the first counts.
    """
    small: dict[str, Mapping[str, Any]] = {}
    for key, entry in entries.items():
        is_other = all(entry["name"] != known["name"] for known in small.values())
        if entry["events"] < SMALL_SET and is_other:
            small[key] = entry
    if len(small) < 2:
        return {}
    shared = [
        name
        for name in next(iter(small.values()))["subjects"]
        if all(name in entry["subjects"] and name not in entry["stages"] for entry in small.values())
    ]
    tested = {key: list(_open_runs(folder / key, entry["seeds"])) for key, entry in small.items()}
    users, first_user = [], 0
    for runs in tested.values():
        user_P = runs[0].results.user
        users.append(user_P + first_user)
        first_user += int(user_P.max(initial=-1)) + 1
    user_N = np.concatenate(users)

    def concatenate(metric: str, name: str | None) -> np.ndarray:
        """Return a metric of each event [N], averaged over the seeds of its set; None for the last stage."""
        return np.concatenate(
            [
                np.mean(
                    [
                        compute_per_event(metric, run.load_results(name or small[key]["stages"][-1]))
                        for run in runs
                    ],
                    0,
                )
                for key, runs in tested.items()
            ]
        )

    own = {metric: concatenate(metric, None) for metric in metrics}
    paired = {
        name: {
            metric: compare_paired(own[metric], concatenate(metric, name), user_N, 0) for metric in metrics
        }
        for name in shared
    }
    return {"sets": list(small), "events": len(user_N), "paired": paired}


def _open_runs(folder: Path, seeds: Sequence[int]) -> Iterator[TestedRun]:
    """Yield the runs of an entry."""
    for seed in seeds:
        run = RunFolder(get_seed_dir(folder, seed))
        yield TestedRun.from_run(run, load_scenario(run.scenario)[0])
