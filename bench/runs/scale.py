"""A log of any size through a whole run: prepare, train, evaluate; seconds and memory of each.

The run is `nonet run` in a process of its own, so that its memory is that of a user's run.
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


def bench_scale(
    seeds: list[int],
    events: float = 1e6,
    users: float = 0,
    items: float = 0,
    steps: int = 200,
    folder: str = "",
    run: bool = True,
    keep: bool = False,
) -> dict[str, Any]:
    """Write a log and run it.

    Args:
        seeds: The first one is used.
        events: Events of the log.
        users: Users of the log; 0 means a twentieth of the events.
        items: Items of the log; 0 means a hundredth of the events.
        steps: Training steps.
        folder: Folder of the log and the run; by default a temporary one.
        run: False prepares the data alone, in this process.
        keep: Whether the folder is kept.

    Returns:
        A row with the seconds of each phase, the events prepared in a second (with reading, and by core without it),
        the seconds from the end of the preparation to the first ten steps, and the highest PSS of all processes
        together in each phase.
    """
    place = Path(folder or tempfile.mkdtemp(prefix="nonet-scale-"))
    count = int(events)
    made = int(users) or max(100, count // 20), int(items) or max(1000, count // 100)
    try:
        began = time.monotonic()
        data = write_log(place / f"log-{count}-{made[0]}-{made[1]}", count, *made, seeds[0])
        seconds = {"writing the log": time.monotonic() - began}
        row = {"events": count, "users": made[0], "items": made[1]}
        row |= {f"{name}_s": round(value, 1) for name, value in seconds.items()}
        run_folder = place / "run"
        shutil.rmtree(run_folder, ignore_errors=True)
        if not run:
            return {"rows": [row | _prepare_alone(data, run_folder, count)], "ratio": {}}
        (place / "scale.yaml").write_text(_make_scenario(data, steps, seeds[0]))
        samples = _run_scenario(place / "scale.yaml", run_folder)
        return {"rows": [row | _summarise_run(run_folder, samples, count)], "ratio": {}}
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _make_scenario(data: dict[str, str], steps: int, seed: int) -> str:
    """Make the scenario of the run."""
    return yaml.dump(
        {
            "name": "scale",
            "seed": seed,
            "data": {
                **data,
                **_DATA,
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


_DATA: dict[str, Any] = {
    "keep": {"item_events": 2, "user_events": 3},
    "split": {"use": "leave_last_out", "test": 1, "valid": 1},
}


def _prepare_alone(data: dict[str, str], folder: Path, events: int) -> dict[str, Any]:
    """Prepare the data alone."""
    folder.mkdir(parents=True)
    options = BuildOptions(data["interactions"], items=data["items"], **_DATA)
    made = prepare_sequences(options, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {"seconds": made.seconds, "cpu_s": made.cpu_s}
    return _summarise_preparation(facts, events) | {"peak RSS_GB": round(peak / 1e9, 2)}


Sample = tuple[
    float, int, dict[str, int]
]  # unix seconds, PSS of all processes together, and by what they are


def _run_scenario(scenario: Path, run: Path) -> list[Sample]:
    """Run a scenario to its end, and return samples of the memory of its processes, about two a second."""
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "run", str(scenario)]
    samples: list[Sample] = []
    with (run.parent / "scale.log").open("w") as log:
        process = subprocess.Popen([*command, "--run-dir", str(run)], stdout=log, stderr=log)
    over = threading.Event()
    thread = threading.Thread(target=_sample_memory, args=(process.pid, over, samples), daemon=True)
    thread.start()
    failed = process.wait()
    over.set()
    thread.join()
    if failed:
        raise RuntimeError(f"the run failed:\n{(run.parent / 'scale.log').read_text()[-4000:]}")
    return samples


def _sample_memory(pid: int, over: threading.Event, samples: list[Sample]) -> None:
    """Sample the memory of a process and its children until told to stop."""
    while not over.wait(0.5):
        parts: dict[str, int] = {}
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                try:
                    name = (process.cmdline() or [process.name()])[0].rpartition("/")[2]
                    parts[name] = parts.get(name, 0) + process.memory_full_info().pss
                except psutil.Error:
                    continue
        except psutil.Error:
            return
        samples.append((time.time(), sum(parts.values()), parts))


def _summarise_run(run: Path, samples: list[Sample], events: int) -> dict[str, Any]:
    """Summarise a run: seconds, memory by phase and recall."""
    wall = json.loads((run / "results" / "wall.json").read_text())
    report = json.loads((run / "report.json").read_text())
    prepared = os.stat(run / "results" / "tokenise.json").st_mtime
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [float(record["t"]) for record in records if record["stage"] == "pretrain"]
    row = {f"{name}_s": round(seconds, 1) for name, seconds in wall.items()}
    facts = run / "artifacts" / "prepared.json"
    if facts.exists():
        row |= _summarise_preparation(json.loads(facts.read_text()), events)
    row["first steps after preparation_s"] = round(min(steps) - prepared, 1)
    cuts = [0.0, prepared, max(steps), float("inf")]
    for phase, start, stop in zip(_PHASES, cuts, cuts[1:], strict=False):
        peak = max((sample for sample in samples if start <= sample[0] < stop), key=lambda each: each[1])
        row[f"{phase} PSS_GB"] = round(peak[1] / 1e9, 2)
        largest = sorted(peak[2].items(), key=lambda part: -part[1])[:6]
        row[f"{phase} largest"] = ", ".join(f"{name} {pss / 1e9:.2f}" for name, pss in largest)
    row["PSS_GB"] = round(max(pss for _, pss, _ in samples) / 1e9, 2)
    scores = {**report["baselines"], **report["stages"]}
    return row | {f"{name} recall@10": round(values["recall@10"], 4) for name, values in scores.items()}


def _summarise_preparation(facts: dict[str, Any], events: int) -> dict[str, Any]:
    """Return the seconds of each step of the preparation, events per second of wall-clock time, and per core without reading."""
    steps, cpu_s = facts["seconds"], facts["cpu_s"]
    after_reading = sum(seconds for name, seconds in cpu_s.items() if name != "read")
    return {
        **{f"prepare {name}_s": seconds for name, seconds in steps.items()},
        "prepare events/s": int(events / max(1e-9, sum(steps.values()))),
        "prepare events/s a core after reading": int(events / max(1e-9, after_reading)),
    }
