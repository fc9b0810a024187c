"""Assembles report.json, the numbers that a run found, from the files under RUN/results."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.record import (
    CommandQueue,
    RunFolder,
    ValidationRecord,
    list_subjects_beside,
    read_journal,
)
from nonet.controller.scenario import Scenario, is_above_floor
from nonet.controller.setup import make_baseline_options
from nonet.embedding.training import COUNTED
from nonet.models.ranking import compare_paired

_NAMED = 50  # users of a reward's quarantine
_PACKAGES = ("nonet", "ray", "torch", "numpy", "pyarrow")


def make_report(
    run: RunFolder,
    scenario: Scenario,
    weights: Mapping[str, int],
    wall_s: Mapping[str, float],
    work: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Assemble, write and return report.json.

    Args:
        run: The folder of the run.
        scenario: The scenario.
        weights: The numbers of dense parameters and sparse rows.
        wall_s: The seconds of each part of the run.
        work: What the groups did: {"idle", "bytes_out", "moved", "published"}.
    """
    facts = run.read_facts()
    assert facts is not None, "a run has artifacts before it has results"
    beside = {subject: {} for name in scenario.stages for subject in list_subjects_beside(name)}
    baselines = make_baseline_options(scenario) | beside
    comparison = run.read_json("results/comparison.json") or {}
    results = {name: run.read_json(f"results/{name}.json") for name in (*baselines, *scenario.stages)}
    results = {name: result for name, result in results.items() if result}
    rewards = _compare_rewards(run, scenario)
    report = {
        "run": run.id,
        "name": scenario.name,
        "seed": scenario.seed,
        "command": (run.read_json("command.json") or {}).get("command", f"nonet run {scenario.name}"),
        "data": _read_data(facts["data"]),
        "stages": {name: select_headline(results[name]) for name in scenario.stages if name in results},
        "baselines": {name: select_headline(results[name]) for name in baselines if name in results},
        "trained": {name: result["trained"] for name, result in results.items() if "trained" in result},
        "detail": {name: result["detail"] for name, result in results.items()},
        "paired": comparison.get("paired", {}),
        **_collect_parts(results),
        **rewards,
        "quarantined": _count_quarantined(run),
        "commands": CommandQueue(run).list_taken(),
        "floors": _check_floors(run, scenario, rewards.get("stage_rewards", {})),
        "validation": _read_validations(run, scenario),
        "tokenizer": facts["tokenizer"],
        "users": _join_users(comparison.get("shown", []), results),
        "wall_s": dict(wall_s),
        **work,
        "rows": _count_rows(run),
        "joins": run.read_json("results/joins.json") or {},
        "machine": read_machine(run.metrics),
        "sparse": _count_sparse(run, scenario),
        "absent_reads": _count_absent_reads(run),
        "peak_rss_bytes": 0,
        "weights": dict(weights),
        "versions": {
            "python": platform.python_version(),
            **{name: _find_version(name) for name in _PACKAGES},
        },
    }
    run.write_json("report.json", report)
    return report


def select_headline(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the main metrics of a result: test events, ranked exhaustively if they were, of all users."""
    test = result["detail"].get("test", {})
    return test.get("exhaustive", test.get("beam", {})).get("all", {})


def _read_data(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the data, with the share of users without a test event."""
    left_out, users = facts.get("users_only_trained"), facts.get("users")
    return {**facts} | ({"share_only_trained": left_out / users} if users and left_out is not None else {})


def _collect_parts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Collect further parts of the results by part and subject, and the segments, which are the same for all subjects."""
    parts = {
        part: {name: result[part] for name, result in results.items() if part in result}
        for part in ("lists", "memory", "segments", "sampled")
    }
    return parts | {"segments": next(iter(parts["segments"].values()), {})}


def read_machine(metrics: Path) -> dict[str, dict[str, Any]]:
    """Return the machine use of each stage's first trainer from the metrics file.

    The result has, by stage, the model FLOP/s utilisation (mfu), achieved and possible operations per second, positions
    per second, and the share of time by part; the rest is "other". A step that a resume wrote twice counts once.
    """
    values: dict[str, dict[tuple[str, int], float]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill; its step was run and written again
            continue
        if record["name"].startswith("machine "):
            name = record["name"].removeprefix("machine ")
            values.setdefault(record["stage"], {})[name, record["step"]] = record["value"]
    found = {}
    for stage, entries in values.items():
        sums: dict[str, float] = {}
        for (name, _), value in entries.items():
            sums[name] = sums.get(name, 0.0) + value
        seconds, flops = sums.pop("seconds"), sums.pop("flops")
        positions, could = sums.pop("positions"), sums.pop("could")
        if not seconds or not could:
            continue
        shares = {name: value / seconds for name, value in sums.items()}
        found[stage] = {
            "mfu": flops / could,
            "flops_per_s": flops / seconds,
            "matmul_flops_per_s": could / seconds,
            "tokens_per_s": positions / seconds,
            "shares": shares | {"other": max(0.0, 1.0 - sum(shares.values()))},
        }
    return found


def _compare_rewards(run: RunFolder, scenario: Scenario) -> dict[str, Any]:
    """Return the rewards before and after every RL stage; those of the last one stand for the run."""
    stages = {
        name: compared
        for name in scenario.stages
        if (compared := _compare_stage_rewards(run, name, scenario.seed)) is not None
    }
    return {**list(stages.values())[-1], "stage_rewards": stages} if stages else {}


def _compare_stage_rewards(run: RunFolder, stage: str, seed: int) -> dict[str, Any] | None:
    """Return [before, after, low, high] of each reward of a stage, or None if it was not measured.

    The means and the 95 % interval of the change are over users that RL never trains on.
    """
    files = [run.results / f"{stage}.rewards.{when}.npz" for when in ("before", "after")]
    if not all(file.exists() for file in files):
        return None
    before, after = (dict(np.load(file)) for file in files)
    keys = [
        key for key in after if key in before and key not in ("user", "of") and not key.startswith("weight.")
    ]
    if weights := {key: after[f"weight.{key}"] for key in keys if f"weight.{key}" in after}:
        for part in (before, after):  # by what counts at the end of the stage, whatever was set meanwhile
            part["total"] = np.sum([weight * part[key] for key, weight in weights.items()], axis=0)
    scored = ~np.any([np.isnan(part[key]) for part in (before, after) for key in keys], axis=0)
    if not scored.any():  # fewer than five users have RL prompts: none was kept out
        return None
    means, user = {}, after["user"][scored]
    for key in keys:
        new, old = after[key][scored], before[key][scored]
        change = compare_paired(new, old, user, seed)
        means[key] = [float(old.mean()), float(new.mean()), change["low"], change["high"]]
    reranked = run.results / f"{stage}.rewards.rerank.npz"
    more = {}
    if reranked.exists() and weights:
        lists = dict(np.load(reranked))
        if all(len(lists.get(key, ())) == len(scored) for key in weights):
            total = np.sum([weight * lists[key] for key, weight in weights.items()], axis=0)[scored]
            change = compare_paired(total, before["total"][scored], user, seed)
            more["rerank"] = {
                "multiplier": float(lists["multiplier"]),
                "total": [means["total"][0], float(np.nanmean(total)), change["low"], change["high"]],
            }
    users, prompts = len(np.unique(user)), len(user)
    of = int(after["of"]) if "of" in after else prompts
    some = f" of {of}, drawn by the seed," if of > prompts else ""
    return {
        "rewards": means,
        "rewards_on": f"{prompts} prompts{some} of {users} users that RL never trained on",
        **more,
    }


def _count_quarantined(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return, by reward, the number of prompts without a score, of steps with such prompts, the first users and a reason."""
    found: dict[str, dict[str, Any]] = {}
    for record in read_journal(run.journal):
        if "quarantined" not in record:
            continue
        entry = found.setdefault(
            record["quarantined"], {"prompts": 0, "steps": 0, "users": [], "why": record["why"]}
        )
        entry["prompts"] += len(record["uids"])
        entry["steps"] += 1
        entry["users"] = list(dict.fromkeys([*entry["users"], *record["users"]]))[:_NAMED]
    return found


def _check_floors(
    run: RunFolder, scenario: Scenario, rewards: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the state of each floor by `stage.reward`.

    An entry has the floor, the mean over the last fifth of steps, the last multiplier, [before, after] of users that RL
    never trains on, and whether it was met within 2 %, measured on those users if there are any.
    """
    values: dict[tuple[str, str], dict[int, float]] = {}
    for record in _read_records(run):
        if record["role"] == "trainer" and record["name"].startswith(("reward.", "multiplier.")):
            values.setdefault((record["stage"], record["name"]), {})[record["step"]] = record["value"]
    floors = {
        (stage, name): options.at_least
        for stage, body in scenario.stages.items()
        for name, options in getattr(body, "rewards", {}).items()
        if options.at_least is not None
    }
    found = {}
    for (stage, name), floor in floors.items():
        means, steps = (
            values.get((stage, f"reward.{name}"), {}),
            values.get((stage, f"multiplier.{name}"), {}),
        )
        if not means:
            continue
        last = sorted(means)[-max(1, len(means) // 5) :]
        mean = float(np.mean([means[step] for step in last]))
        held_out = rewards.get(stage, {}).get("rewards", {}).get(name, [])[:2]
        shown = held_out[-1] if held_out else mean
        found[f"{stage}.{name}"] = {
            "at_least": floor,
            "mean": mean,
            "multiplier": steps[max(steps)] if steps else 0.0,
            "held_out": held_out,
            "held": is_above_floor(shown, floor),
            "steps": len(last),
        }
    return found


def _read_validations(run: RunFolder, scenario: Scenario) -> dict[str, Any]:
    """Return the validation results by stage; entries of the history have the mean training loss since the previous one."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for record in _read_records(run):
        if record["role"] == "trainer" and record["name"] in ("loss", "events"):
            values.setdefault((record["stage"], record["name"]), {})[record["step"]] = record["value"]
    stages = {}
    for name in scenario.stages:
        kept, before = ValidationRecord(run, name), 0
        if kept.end is None or not kept.history:
            continue
        losses, events = values.get((name, "loss"), {}), values.get((name, "events"), {})
        history = []
        for entry in kept.history:
            since = [step for step in losses if before < step <= entry["step"]]
            weight = sum(events.get(step, 0.0) for step in since)
            loss = sum(losses[step] * events.get(step, 0.0) for step in since) / weight if weight else None
            history.append(entry | {"loss": loss})
            before = entry["step"]
        stages[name] = {**kept.end, "history": history}
    return stages


def _join_users(shown: list[dict[str, Any]], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        user | {"recommended": {name: result["shown"][index] for name, result in results.items()}}
        for index, user in enumerate(shown)
    ]


def _count_sparse(run: RunFolder, scenario: Scenario) -> dict[str, dict[str, int]]:
    """Return, by table, the current number of rows and the counts of the whole run, such as admitted and evicted rows."""
    counts_by_table: dict[str, dict[str, int]] = {
        name: dict.fromkeys(("rows", *COUNTED), 0) for name in scenario.sparse.tables
    }
    seen: dict[tuple[str, int, str], int] = {}
    for record in _read_records(run):
        if record["role"] == "embedding":
            seen[record["stage"], record["step"], record["name"]] = int(record["value"])
    for (_, _, name), value in seen.items():
        table, _, what = name.rpartition(".")
        counts = counts_by_table[table]
        counts[what] = counts[what] + value if what in COUNTED else value
    return counts_by_table


def _count_absent_reads(run: RunFolder) -> int:
    """Return the number of positions for which rollouts with a replica or remote reader read the default row."""
    reads = {(r["stage"], r["step"]): int(r["value"]) for r in _read_records(run) if r["role"] == "rollout"}
    return sum(reads.values())


def _read_records(run: RunFolder) -> Iterator[dict[str, Any]]:
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # torn by a kill; its step was run and written again
            continue


def _count_rows(run: RunFolder) -> dict[str, int]:
    """Return the number of trained events by stage; a step that a resume wrote twice counts once."""
    events: dict[tuple[str, int], float] = {}
    for record in _read_records(run):
        if record["name"] in ("events", "prompts"):
            events[record["stage"], record["step"]] = record["value"]
    rows: dict[str, int] = {}
    for (stage, _), value in events.items():
        rows[stage] = rows.get(stage, 0) + int(value)
    return rows


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
