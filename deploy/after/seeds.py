"""`nonet run SCENARIO --seeds 7,8,9`: run a scenario once per seed, and combine the results in one report.

The metrics are averaged over the seeds before users are resampled for the intervals of differences. So an interval
describes the training recipe and not one model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder, check_no_storage, create_run
from nonet.controller.scenario import (
    Scenario,
    check_supported,
    find_scenario,
    flatten_document,
    hide_in_command,
    list_shipped_scenarios,
    load_scenario,
    select_fixed_keys,
    to_document,
)
from nonet.controller.setup import check_same
from nonet.deploy.after.ranks import TestedRun, check_same_events
from nonet.deploy.report import render_seeds_page
from nonet.deploy.run import api
from nonet.errors import ConfigError
from nonet.models.ranking import is_significant
from nonet.plugins import load_heavy
from nonet.suggest import join_names

_START = "start.json"  # how the runs of a folder were started
_SEED_KEYS = ("seed", "evaluate.baselines")  # in which runs of different seeds may differ

StartSeed = Callable[[int, Path], bool]  # runs or resumes a seed in a folder; returns whether it has finished


def run_seeds(
    source: str, seeds: Sequence[int], changes: Sequence[str], run_dir: Path | None, command: str = ""
) -> tuple[Path, dict[str, Any] | None]:
    """Run a scenario once per seed.

    Finished seeds are kept, and an unfinished one continues from its newest checkpoint.

    Args:
        source: The scenario's file or name.
        seeds: The seeds, one for each run.
        changes: Changes of keys, each "a.b=c".
        run_dir: The folder of all seeds, by default a new one.
        command: The command that starts the runs, for the report.

    Returns:
        The folder, and the combined result; None if a run was stopped.

    Raises:
        ConfigError: A seed occurs twice, the scenario ranks no items, or the folder has runs of another
            scenario.
    """
    check_seeds(seeds)
    scenario = api.scenario(source, list(changes)).scenario
    check_comparable(scenario)
    check_no_storage(scenario.storage and scenario.storage.url, "run --seeds")
    folder = (run_dir or create_run(f"{scenario.name}-seeds").path).absolute()
    if RunFolder(folder).scenario.exists():
        raise ConfigError(f"{folder} is a run; with --seeds, --run-dir must be a folder of runs")
    scenario_by_seed = {seed: _load_seed(source, changes, seed, get_seed_dir(folder, seed)) for seed in seeds}
    _write_start(folder, source, seeds, changes, command)
    return folder, combine_seeds(
        seeds, folder, lambda seed, path: _run_seed(scenario_by_seed[seed], path, command)
    )


def run_seed(source: str, changes: Sequence[str], seed: int, path: Path, command: str = "") -> bool:
    """Run a scenario with a seed in a folder, or continue such a run from its newest checkpoint.

    Returns:
        Whether it has finished and nobody has asked to stop.

    Raises:
        ConfigError: The folder has a run of another scenario.
    """
    return _run_seed(_load_seed(source, changes, seed, path), path, command)


def _load_seed(source: str, changes: Sequence[str], seed: int, path: Path) -> api.ScenarioFile:
    """Load the scenario of one seed. Raises ConfigError if its folder has a run of another scenario."""
    stored = RunFolder(path).scenario
    scenario = api.scenario(source, [*changes, f"seed={seed}"], stored=stored if stored.exists() else None)
    if stored.exists():
        check_same(scenario.scenario, RunFolder(path))
    return scenario


def _run_seed(scenario: api.ScenarioFile, path: Path, command: str) -> bool:
    """Run or resume a scenario in a folder; return whether it has finished and nobody has asked to stop."""
    if list(RunFolder(path).checkpoints.glob("step-*")):
        run = api.resume(path, scenario_file=scenario)
    else:
        run = api.run(scenario, run_dir=path, command=command)
    return run.state != "stopped" and not run.was_interrupted


def resume_seeds(folder: Path, changes: Sequence[str]) -> dict[str, Any] | None:
    """Continue `run_seeds` in its folder.

    Args:
        folder: The folder of all seeds.
        changes: Values of env.vars, each "a.b=c", which the folder does not store.

    Returns:
        The combined result; None if a run was stopped.

    Raises:
        ConfigError: All seeds are finished, or the folder does not say how its runs were started.
    """
    if (folder / "seeds.json").exists():
        raise ConfigError(f"{folder.name} is finished: see {folder / 'report.html'}")
    start = RunFolder(folder).read_json(_START)
    if start is None:
        raise ConfigError(
            f"{folder} is a folder of several runs; to continue, repeat the command that started them with --run-dir {folder}"
        )
    return run_seeds(
        start["scenario"], start["seeds"], [*start["changes"], *changes], folder, start["command"]
    )[1]


def _write_start(
    folder: Path, source: str, seeds: Sequence[int], changes: Sequence[str], command: str
) -> None:
    """Write what `resume_seeds` needs into the folder of all seeds, without values of env.vars."""
    scenario = source if source in list_shipped_scenarios() else str(find_scenario(source).absolute())
    shown = [change for change in changes if hide_in_command(["--set", change])[1] == change]
    record = {"scenario": scenario, "seeds": list(seeds), "changes": shown, "command": command}
    RunFolder(folder).write_json(_START, record)


def combine_seeds(seeds: Sequence[int], folder: Path, start: StartSeed) -> dict[str, Any] | None:
    """Run the seeds that have not finished, and combine the results of all.

    Args:
        seeds: The seeds, one for each run.
        folder: The folder; each seed runs in its subfolder seed-N.
        start: Runs or resumes a seed in a folder, and returns whether it has finished.

    Returns:
        The combined result, which is also written to seeds.json and report.html in the folder; None if a seed did
        not finish.
    """
    check_seeds(seeds)
    make_folder(folder)
    runs = []
    for seed in seeds:
        run = RunFolder(get_seed_dir(folder, seed))
        if run.read_json("report.json") is None and not start(seed, run.path):
            return None
        runs.append(run)
    report = runs[0].read_json("report.json") or {}
    pooled = {
        "name": report.get("name"),
        "command": report.get("command"),
        "seeds": list(seeds),
    } | _combine_runs(runs)
    write_whole(folder / "seeds.json", f"{json.dumps(pooled, indent=1)}\n".encode())
    write_whole(folder / "report.html", render_seeds_page(pooled).encode())
    return pooled


def get_seed_dir(folder: Path, seed: int) -> Path:
    """Return the folder of a seed's run."""
    return folder / f"seed-{seed}"


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise ConfigError unless seeds are given, distinct, and such as scenarios may have."""
    if len(set(seeds)) < len(seeds) or not seeds or not all(0 <= seed < 1 << 63 for seed in seeds):
        raise ConfigError(
            f"--seeds must be different numbers from 0 on, below 2^63, such as 7,8,9; got {','.join(map(str, seeds))}"
        )


def check_comparable(scenario: Scenario) -> None:
    """Raise ConfigError unless the scenario has metrics in which runs can be compared, such as metrics of single events."""
    check_supported(scenario, "run --seeds", scenario.name)
    if not load_heavy(scenario.model.spec.results).select_metrics(scenario.evaluate.metrics):
        raise ConfigError(
            "evaluate.metrics: --seeds needs a metric that is defined for single events, such as recall@10; "
            f"got {', '.join(scenario.evaluate.metrics)}"
        )


def _combine_runs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Combine the test results of runs that differ only in the seed.

    Returns:
        {"stages": names, "subjects": {name: {metric: {mean, sd, values}}} of all stages and baselines, "paired":
        {"a-b": {metric: {diff, low, high}}}, "events": number of test events, "lower_is_better": names of such metrics}. Means
        and values are None where the labels do not define the metric, and "paired" leaves it out.
    """
    tested = [TestedRun.from_run(run, load_scenario(run.scenario)[0]) for run in runs]
    report = runs[0].read_json("report.json") or {}
    for run, other in zip(runs[1:], tested[1:], strict=True):
        check_same_events(tested[0], other)
        _check_same_recipe(runs[0], run)
    baselines, stages = list(report.get("baselines") or {}), list(report.get("stages") or {})
    # Shapes: S seeds, P held-out test events.
    results, metrics = tested[0].results, tested[0].results.select_metrics(tested[0].metrics)
    values_by_subject = {
        subject: np.stack([run.load_results(subject) for run in tested]) for subject in (*baselines, *stages)
    }
    subjects = {
        subject: {metric: _summarise_values(results.compute(metric, values_SP)) for metric in metrics}
        for subject, values_SP in values_by_subject.items()
    }
    pairs = [(stage, other) for stage in stages for other in (*baselines, *stages[: stages.index(stage)])]
    differences = {
        f"{a}-{b}": results.compare(metrics, values_by_subject[a], values_by_subject[b]) for a, b in pairs
    }
    return {
        "stages": stages,
        "subjects": subjects,
        "paired": differences,
        "events": len(tested[0].events),
        "lower_is_better": sorted(tested[0].lower_is_better & set(metrics)),
    }


def _check_same_recipe(first: RunFolder, other: RunFolder) -> None:
    """Check that two runs of different seeds have the same scenario and numbers of users, items and events.

    The scenarios may differ in the options of baselines, which the first seed chooses for the others.

    Raises:
        ConfigError: They differ.
    """
    documents = [
        {key: value for key, value in flatten_document(_read_recipe(run)) if not key.startswith(_SEED_KEYS)}
        for run in (first, other)
    ]
    changed = sorted(
        key
        for key in documents[0].keys() | documents[1].keys()
        if documents[0].get(key) != documents[1].get(key)
    )
    if changed:
        raise ConfigError(
            f"{other.path} differs from {first.path} in more than the seed: {join_names(changed, 3)}. Their results cannot be "
            "averaged; delete it to run that seed again"
        )


def _read_recipe(run: RunFolder) -> dict[str, Any]:
    """Return what runs of different seeds must have in common, and the keys in `_SEED_KEYS`."""
    data = (run.read_json("report.json") or {}).get("data") or {}
    sizes = {name: data.get(name) for name in ("users", "items", "events")}
    return {"number of": sizes} | select_fixed_keys(to_document(load_scenario(run.scenario)[0]))


def _summarise_values(values_S: np.ndarray) -> dict[str, Any]:
    """Return the mean and the standard deviation of one value per seed, and the values; None for those that are NaN."""
    if np.isnan(values_S).any():
        values = [None if np.isnan(value) else float(value) for value in values_S]
        return {"mean": None, "sd": None, "values": values}
    sd = float(values_S.std(ddof=1)) if len(values_S) > 1 else 0.0
    return {"mean": float(values_S.mean()), "sd": sd, "values": [float(value) for value in values_S]}


def format_seeds(pooled: Mapping[str, Any]) -> str:
    """Format a combined result of `combine_seeds`: a table of means and standard deviations, then the differences."""
    metrics = list(next(iter(pooled["subjects"].values())))
    lines = [
        f"{len(pooled['seeds'])} seeds ({', '.join(map(str, pooled['seeds']))}), {pooled['events']:,} test events each"
    ]
    lines.append(f"\n{'':<20}" + "".join(f"{metric:>20}" for metric in metrics))
    for name, by_metric in pooled["subjects"].items():
        cells = (
            "-" if row["mean"] is None else f"{row['mean']:.4f} +- {row['sd']:.4f}"
            for row in by_metric.values()
        )
        lines.append(f"{name:<20}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append("")
    for pair, by_metric in pooled["paired"].items():
        cells = (
            f"{row['diff']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]{'' if is_significant(row) else ' (not significant)'}"
            for row in by_metric.values()
        )
        texts = (f"{metric} {cell}" for metric, cell in zip(by_metric, cells, strict=True))
        lines.append(f"{pair}: " + "; ".join(texts))
    return "\n".join(lines)
