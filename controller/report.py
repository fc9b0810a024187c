"""Assembles report.json, the results of a run, from its metrics, its journal and the files under RUN/results."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import open_file
from nonet.controller.cluster import read_isolations
from nonet.controller.record import (
    PREVIOUS_RUN,
    CommandQueue,
    RunFolder,
    ValidationRecord,
    list_subjects_beside,
    read_journal,
)
from nonet.controller.scenario import Scenario, is_above_floor
from nonet.controller.setup import make_baseline_options, read_interruptions
from nonet.embedding.training import COUNTED
from nonet.models.ranking import compare_paired

_MAX_NAMED_USERS = 50  # users that the report names for each reward whose prompts were quarantined
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
        weights: The numbers of dense parameters and sparse rows, by name.
        wall_s: Wall-clock seconds by part of the run.
        work: Statistics of the worker groups, by "idle", "bytes_out", "moved", "published" and "tracking".
    """
    facts = run.read_facts()
    assert facts is not None, "a run has artifacts before it has results"
    # Subjects that are ranked for comparison with a stage, such as its controls; they have no options.
    extra_subjects = {subject: {} for name in scenario.stages for subject in list_subjects_beside(name)}
    baselines = make_baseline_options(scenario) | extra_subjects | {PREVIOUS_RUN: {}}
    comparison = run.read_json("results/comparison.json") or {}
    results = {name: run.read_json(f"results/{name}.json") for name in (*baselines, *scenario.stages)}
    results = {name: result for name, result in results.items() if result}
    rewards = _compare_rewards(run, scenario)
    report: dict[str, Any] = {
        "run": run.id,
        "name": scenario.name,
        "seed": scenario.seed,
        "command": (run.read_json("command.json") or {}).get("command", f"nonet run {scenario.name}"),
        "data": _read_data(facts["data"]),
        "lower_is_better": sorted(filter(scenario.model.spec.is_lower_better, scenario.evaluate.metrics)),
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
        "users": [
            user | {"recommended": {name: result["shown"][index] for name, result in results.items()}}
            for index, user in enumerate(comparison.get("shown", []))
        ],
        "wall_s": dict(wall_s),
        **work,
        "rows": _count_rows(run),
        "joins": run.read_json("results/joins.json") or {},
        "machine": read_machine(run.metrics),
        "sparse": _count_sparse(run, scenario),
        "absent_reads": _count_absent_reads(run),
        "peak_rss_bytes": 0,  # the driver fills it in
        "weights": dict(weights),
        "processor": _read_processor(),
        "versions": {
            "python": platform.python_version(),
            **{name: _find_version(name) for name in _PACKAGES},
        },
    }
    if interruptions := read_interruptions(run):
        report["interruptions"] = interruptions
    if isolations := read_isolations(run.path):
        report["isolated"] = [asdict(entry) for entry in isolations]
    run.write_json("report.json", report)
    return report


def select_headline(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics over all test events of a result, from the exhaustive ranking if there was one, else by beams.

    A metric is None where the labels do not define it.
    """
    test = result["detail"].get("test", {})
    return test.get("exhaustive", test.get("beam", {})).get("all", {})


def _read_data(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the data and, if it is known, the share of users without a test event."""
    untested_users, users = facts.get("users_only_trained"), facts.get("users")
    return {**facts} | (
        {"share_only_trained": untested_users / users} if users and untested_users is not None else {}
    )


def _collect_parts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return further parts of the results by part and subject; "segments" is the same for all subjects and returned once."""
    parts = {
        part: {name: result[part] for name, result in results.items() if part in result}
        for part in ("lists", "memory", "segments", "cold", "sampled", "calibration")
    }
    return parts | {"segments": next(iter(parts["segments"].values()), {})}


def read_machine(metrics: Path) -> dict[str, dict[str, Any]]:
    """Return the machine use of each stage's first trainer from the metrics file.

    Returns:
        By stage: the model FLOP/s utilisation (`mfu`), the achieved and possible operations per second, positions per second,
        and the share of time by part, in which "other" is the rest. A step that a resume wrote twice counts once.
    """
    values_by_stage: dict[str, dict[tuple[str, int], float]] = {}
    for record in _read_records(metrics):
        if record["name"].startswith("machine "):
            name = record["name"].removeprefix("machine ")
            values_by_stage.setdefault(record["stage"], {})[name, record["step"]] = record["value"]
    use_by_stage = {}
    for stage, entries in values_by_stage.items():
        sums: dict[str, float] = {}
        for (name, _), value in entries.items():
            sums[name] = sums.get(name, 0.0) + value
        seconds, flops = sums.pop("seconds"), sums.pop("flops")
        positions, possible_flops = sums.pop("positions"), sums.pop("could")
        if not seconds or not possible_flops:
            continue
        shares = {name: value / seconds for name, value in sums.items()}
        use_by_stage[stage] = {
            "mfu": flops / possible_flops,
            "flops_per_s": flops / seconds,
            "matmul_flops_per_s": possible_flops / seconds,
            "tokens_per_s": positions / seconds,
            "shares": shares | {"other": max(0.0, 1.0 - sum(shares.values()))},
        }
    return use_by_stage


def _compare_rewards(run: RunFolder, scenario: Scenario) -> dict[str, Any]:
    """Return the rewards before and after every RL stage, as `stage_rewards`, and those of the last RL stage on their own."""
    stages = {
        name: compared
        for name in scenario.stages
        if (compared := _compare_stage_rewards(run, name, scenario.seed)) is not None
    }
    return {**list(stages.values())[-1], "stage_rewards": stages} if stages else {}


def _compare_stage_rewards(run: RunFolder, stage: str, seed: int) -> dict[str, Any] | None:
    """Return the rewards of users that RL never trains on, before and after a stage; None if they were not measured.

    Returns:
        `rewards`: by reward, its mean before and after the stage, and the bounds of the 95 % interval of the change.
        `rewards_on`: the number of prompts and users, in words. `rerank`, if the lists were re-ranked: the multiplier, and
        for the total reward, the mean before and re-ranked with the bounds of the change.
    """
    files = [run.results / f"{stage}.rewards.{when}.npz" for when in ("before", "after")]
    if not all(file.exists() for file in files):
        return None
    before, after = (dict(np.load(file)) for file in files)
    keys = [
        key for key in after if key in before and key not in ("user", "of") and not key.startswith("weight.")
    ]
    if weights := {key: after[f"weight.{key}"] for key in keys if f"weight.{key}" in after}:
        # Both totals have the weights at the end of the stage, so that they are comparable.
        for probe in (before, after):
            probe["total"] = np.sum([weight * probe[key] for key, weight in weights.items()], axis=0)
    scored = ~np.any([np.isnan(probe[key]) for probe in (before, after) for key in keys], axis=0)
    if not scored.any():  # fewer than five users have RL prompts, so none was held out
        return None
    means, user = {}, after["user"][scored]
    for key in keys:
        new, old = after[key][scored], before[key][scored]
        change = compare_paired(new, old, user, seed)
        means[key] = [float(old.mean()), float(new.mean()), change["low"], change["high"]]
    rerank_file = run.results / f"{stage}.rewards.rerank.npz"
    rerank = {}
    if rerank_file.exists() and weights:
        rerank_probe = dict(np.load(rerank_file))
        if all(len(rerank_probe.get(key, ())) == len(scored) for key in weights):
            total = np.sum([weight * rerank_probe[key] for key, weight in weights.items()], axis=0)[scored]
            change = compare_paired(total, before["total"][scored], user, seed)
            rerank["rerank"] = {
                "multiplier": float(rerank_probe["multiplier"]),
                "total": [means["total"][0], float(np.nanmean(total)), change["low"], change["high"]],
            }
    users, prompts = len(np.unique(user)), len(user)
    all_prompts = int(after["of"]) if "of" in after else prompts
    drawn_from = f" of {all_prompts}, drawn by the seed," if all_prompts > prompts else ""
    return {
        "rewards": means,
        "rewards_on": f"{prompts} prompts{drawn_from} of {users} users that RL never trained on",
        **rerank,
    }


def _count_quarantined(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return, by reward: the numbers of prompts without a score and of steps with such prompts, some users, and a reason."""
    entry_by_reward: dict[str, dict[str, Any]] = {}
    for record in read_journal(run.journal):
        if "quarantined" not in record:
            continue
        entry = entry_by_reward.setdefault(
            record["quarantined"], {"prompts": 0, "steps": 0, "users": [], "why": record["why"]}
        )
        entry["prompts"] += len(record["uids"])
        entry["steps"] += 1
        entry["users"] = list(dict.fromkeys([*entry["users"], *record["users"]]))[:_MAX_NAMED_USERS]
    return entry_by_reward


def _check_floors(
    run: RunFolder, scenario: Scenario, rewards_by_stage: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return whether each floor of a reward was met, with the numbers that show it.

    Returns:
        By "stage.reward": the floor (`at_least`), the mean over the last fifth of the steps, the last multiplier, the means
        before and after RL of users that RL never trains on (`held_out`), and whether the floor was met within 2 % (`held`),
        measured on those users if there are any.
    """
    metrics: dict[tuple[str, str], dict[int, float]] = {}
    for record in _read_records(run.metrics):
        if record["role"] == "trainer" and record["name"].startswith(("reward.", "multiplier.")):
            metrics.setdefault((record["stage"], record["name"]), {})[record["step"]] = record["value"]
    floors = {
        (stage, name): options.at_least
        for stage, stage_options in scenario.stages.items()
        for name, options in getattr(stage_options, "rewards", {}).items()
        if options.at_least is not None
    }
    state_by_floor = {}
    for (stage, name), floor in floors.items():
        mean_by_step = metrics.get((stage, f"reward.{name}"), {})
        multiplier_by_step = metrics.get((stage, f"multiplier.{name}"), {})
        if not mean_by_step:
            continue
        last_steps = sorted(mean_by_step)[-max(1, len(mean_by_step) // 5) :]
        mean = float(np.mean([mean_by_step[step] for step in last_steps]))
        held_out = rewards_by_stage.get(stage, {}).get("rewards", {}).get(name, [])[:2]
        measured_mean = held_out[-1] if held_out else mean
        state_by_floor[f"{stage}.{name}"] = {
            "at_least": floor,
            "mean": mean,
            "multiplier": multiplier_by_step[max(multiplier_by_step)] if multiplier_by_step else 0.0,
            "held_out": held_out,
            "held": is_above_floor(measured_mean, floor),
            "steps": len(last_steps),
        }
    return state_by_floor


def _read_validations(run: RunFolder, scenario: Scenario) -> dict[str, Any]:
    """Return the validation results by stage; entries of the history have the mean training loss since the previous one."""
    metrics: dict[tuple[str, str], dict[int, float]] = {}
    for record in _read_records(run.metrics):
        if record["role"] == "trainer" and record["name"] in ("loss", "events"):
            metrics.setdefault((record["stage"], record["name"]), {})[record["step"]] = record["value"]
    stages = {}
    for name in scenario.stages:
        validation, previous_step = ValidationRecord(run, name), 0
        if validation.end is None or not validation.history:
            continue
        losses, events = metrics.get((name, "loss"), {}), metrics.get((name, "events"), {})
        history = []
        for entry in validation.history:
            steps_since = [step for step in losses if previous_step < step <= entry["step"]]
            event_count = sum(events.get(step, 0.0) for step in steps_since)
            loss_sum = sum(losses[step] * events.get(step, 0.0) for step in steps_since)
            history.append(entry | {"loss": loss_sum / event_count if event_count else None})
            previous_step = entry["step"]
        stages[name] = {**validation.end, "history": history}
    return stages


def _count_sparse(run: RunFolder, scenario: Scenario) -> dict[str, dict[str, int]]:
    """Return, by table, the current number of rows and the counts of the whole run, such as admitted and evicted rows."""
    counts_by_table: dict[str, dict[str, int]] = {
        name: dict.fromkeys(("rows", *COUNTED), 0) for name in scenario.sparse.tables
    }
    value_by_record: dict[tuple[str, int, str], int] = {}
    for record in _read_records(run.metrics):
        if record["role"] == "embedding":
            value_by_record[record["stage"], record["step"], record["name"]] = int(record["value"])
    for (_, _, name), value in value_by_record.items():
        table, _, count_name = name.rpartition(".")
        counts = counts_by_table[table]
        counts[count_name] = counts[count_name] + value if count_name in COUNTED else value
    return counts_by_table


def _count_absent_reads(run: RunFolder) -> int:
    """Return the number of positions for which rollouts with a replica or remote reader read the default row."""
    positions_by_step = {
        (r["stage"], r["step"]): int(r["value"]) for r in _read_records(run.metrics) if r["role"] == "rollout"
    }
    return sum(positions_by_step.values())


def _read_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the metrics file."""
    with open_file(metrics) as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:  # cut off when the run was killed; the resumed run wrote its step again
                continue


def _count_rows(run: RunFolder) -> dict[str, int]:
    """Return the number of trained events by stage; a step that a resume wrote twice counts once."""
    events: dict[tuple[str, int], float] = {}
    for record in _read_records(run.metrics):
        if record["name"] in ("events", "prompts"):
            events[record["stage"], record["step"]] = record["value"]
    rows: dict[str, int] = {}
    for (stage, _), value in events.items():
        rows[stage] = rows.get(stage, 0) + int(value)
    return rows


def _find_version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read_processor() -> str:
    """Return the name of this machine's processor, and its architecture if the system does not tell the name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
