"""`nonet bench scale`: seconds and memory of preparing, training and evaluating on a log of any size.

The run is `nonet run` in a process of its own, so that its memory is that of a user's run. Memory is PSS: shared pages are
divided among the processes that share them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from nonet import yaml
from nonet.bench.runs.scale_log import write_log
from nonet.samples.preparation import BuildOptions, prepare_sequences

_PHASES = ("tokenise", "train", "evaluate")
_SAMPLE_INTERVAL_S = 0.5  # between two measurements of memory
_NAMED_PROCESSES = 6  # number of kinds of processes, the largest ones, that a row names
# A measurement of memory: unix seconds, PSS bytes of all processes together, and PSS bytes by name of the process.
Sample = tuple[float, int, dict[str, int]]


def bench_scale(
    seeds: list[int],
    events: float = 1e6,
    users: float = 0,
    items: float = 0,
    steps: int = 200,
    folder: str = "",
    run: bool = True,
    keep: bool = False,
    again: bool = False,
) -> dict[str, Any]:
    """Write a log and run it.

    Args:
        seeds: The first one is used.
        events: Number of events of the log.
        users: Number of users of the log; 0 means a twentieth of the events.
        items: Number of items of the log; 0 means a hundredth of the events.
        steps: Number of training steps.
        folder: Folder of the log and the run; by default a temporary one.
        run: Whether to run training and evaluation; False only prepares the data, in this process.
        keep: Whether the folder is kept.
        again: Whether a second run of the same data follows, which takes their artifacts from the cache.

    Returns:
        A row with the seconds of each phase, the events prepared in a second (with reading, and by core without it),
        the seconds from the end of the preparation to the first ten steps, and the highest PSS of all processes
        together in each phase. With `again`, also the seconds from the start of the first and of the second run to
        their first ten steps.
    """
    bench_folder = Path(folder or tempfile.mkdtemp(prefix="nonet-scale-"))
    event_count = int(events)
    user_count = int(users) or max(100, event_count // 20)
    item_count = int(items) or max(1000, event_count // 100)
    try:
        began = time.monotonic()
        log_folder = bench_folder / f"log-{event_count}-{user_count}-{item_count}"
        data = write_log(log_folder, event_count, user_count, item_count, seeds[0])
        row: dict[str, Any] = {"events": event_count, "users": user_count, "items": item_count}
        row["writing the log_s"] = round(time.monotonic() - began, 1)
        run_folder = bench_folder / "run"
        shutil.rmtree(run_folder, ignore_errors=True)
        if not run:
            return {"rows": [row | _prepare_alone(data, run_folder, event_count)], "ratio": {}}
        cache = bench_folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        scenario = bench_folder / "scale.yaml"
        scenario.write_text(_make_scenario({**data, "cache": str(cache)}, steps, seeds[0]))
        began = time.time()
        samples = _run_scenario(scenario, run_folder)
        row |= _summarise_run(run_folder, samples, event_count)
        if again:
            row["first run, to ten steps_s"] = round(min(_read_step_times(run_folder)) - began, 1)
            shutil.rmtree(run_folder)
            began = time.time()
            _run_scenario(scenario, run_folder)
            row["second run, to ten steps_s"] = round(min(_read_step_times(run_folder)) - began, 1)
        return {"rows": [row], "ratio": {}}
    finally:
        if not keep:
            shutil.rmtree(bench_folder, ignore_errors=True)


def _make_scenario(data: dict[str, str], steps: int, seed: int) -> str:
    """Return the scenario of the run as YAML; `data` are the paths of the tables."""
    return yaml.dump(
        {
            "name": "scale",
            "seed": seed,
            "data": {
                **data,
                **_DATA_OPTIONS,
                "history": 20,
            },
            "tokenizer": {
                "use": "rq_kmeans",
                "vectors": ["categories", "cooccurrence"],
                "codes": 256,
                "dim": 32,
            },
            "model": {"use": "sid_decoder", "width": 64, "layers": 2, "heads": 4, "memory": "on"},
            "sparse": {"tables": {"item": {"dim": 32}}},
            "stages": {"pretrain": {"steps": steps, "batch": {"tokens": 2048}, "lr": 3e-3}},
            "evaluate": {"metrics": ["recall@10", "ndcg@10"], "width": 20, "every": steps},
        }
    )


_DATA_OPTIONS: dict[str, Any] = {
    "keep": {"item_events": 2, "user_events": 3},
    "split": {"use": "leave_last_out", "test": 1, "valid": 1},
}


def _prepare_alone(data: dict[str, str], folder: Path, events: int) -> dict[str, Any]:
    """Prepare the data in this process, and return the columns of the row."""
    folder.mkdir(parents=True)
    options = BuildOptions(data["interactions"], items=data["items"], **_DATA_OPTIONS)
    prepared = prepare_sequences(options, folder)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # ru_maxrss is in KiB
    times = {"seconds": prepared.seconds, "cpu_s": prepared.cpu_s}
    return _summarise_preparation(times, events) | {"peak RSS_GB": round(peak_bytes / 1e9, 2)}


def _run_scenario(scenario: Path, run: Path) -> list[Sample]:
    """Run a scenario to its end, and return samples of the memory of its processes.

    Raises:
        RuntimeError: The run failed; the message has the end of its output.
    """
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "run", str(scenario)]
    samples: list[Sample] = []
    with (run.parent / "scale.log").open("w") as log:
        process = subprocess.Popen([*command, "--run-dir", str(run)], stdout=log, stderr=log)
    stop = threading.Event()
    thread = threading.Thread(target=_sample_memory, args=(process.pid, stop, samples), daemon=True)
    thread.start()
    exit_status = process.wait()
    stop.set()
    thread.join()
    if exit_status:
        raise RuntimeError(f"the run failed:\n{(run.parent / 'scale.log').read_text()[-4000:]}")
    return samples


def _sample_memory(pid: int, stop: threading.Event, samples: list[Sample]) -> None:
    """Append samples of the memory of a process and its children to `samples` until the event `stop` is set."""
    while not stop.wait(_SAMPLE_INTERVAL_S):
        pss_by_name: dict[str, int] = {}
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                try:
                    name = (process.cmdline() or [process.name()])[0].rpartition("/")[2]
                    pss_by_name[name] = pss_by_name.get(name, 0) + process.memory_full_info().pss
                except psutil.Error:  # a child has ended
                    continue
        except psutil.Error:  # the run has ended
            return
        samples.append((time.time(), sum(pss_by_name.values()), pss_by_name))


def _summarise_run(run: Path, samples: list[Sample], events: int) -> dict[str, Any]:
    """Return the columns of a run's row: seconds, memory by phase, and recall."""
    seconds_by_phase = json.loads((run / "results" / "wall.json").read_text())
    report = json.loads((run / "report.json").read_text())
    preparation_end = os.stat(run / "results" / "tokenise.json").st_mtime
    step_times = _read_step_times(run)
    row = {f"{name}_s": round(seconds, 1) for name, seconds in seconds_by_phase.items()}
    preparation_times = run / "artifacts" / "prepared.json"
    if preparation_times.exists():
        row |= _summarise_preparation(json.loads(preparation_times.read_text()), events)
    row["first steps after preparation_s"] = round(min(step_times) - preparation_end, 1)
    bounds = [0.0, preparation_end, max(step_times), float("inf")]
    for phase, start, stop in zip(_PHASES, bounds, bounds[1:], strict=False):
        phase_samples = (sample for sample in samples if start <= sample[0] < stop)
        _, peak_pss, pss_by_name = max(phase_samples, key=lambda sample: sample[1])
        row[f"{phase} PSS_GB"] = round(peak_pss / 1e9, 2)
        largest = sorted(pss_by_name.items(), key=lambda item: -item[1])[:_NAMED_PROCESSES]
        row[f"{phase} largest"] = ", ".join(f"{name} {pss / 1e9:.2f}" for name, pss in largest)
    row["PSS_GB"] = round(max(pss for _, pss, _ in samples) / 1e9, 2)
    scores = {**report["baselines"], **report["stages"]}
    return row | {f"{name} recall@10": round(values["recall@10"], 4) for name, values in scores.items()}


def _read_step_times(run: Path) -> list[float]:
    """Return when each report of steps of a run was made, in unix seconds."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(record["t"]) for record in records if record["stage"] == "pretrain"]


def _summarise_preparation(times: dict[str, Any], events: int) -> dict[str, Any]:
    """Return the columns of a preparation.

    These are the seconds of each step, events per second of wall-clock time, and events per CPU second without reading.

    Args:
        times: "seconds" and "cpu_s" of `PreparedSequences`.
        events: Number of events.
    """
    seconds_by_step, cpu_s = times["seconds"], times["cpu_s"]
    cpu_s_after_reading = sum(seconds for name, seconds in cpu_s.items() if name != "read")
    return {
        **{f"prepare {name}_s": seconds for name, seconds in seconds_by_step.items()},
        "prepare events/s": int(events / max(1e-9, sum(seconds_by_step.values()))),
        "prepare events/s a core after reading": int(events / max(1e-9, cpu_s_after_reading)),
    }
