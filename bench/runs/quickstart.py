"""The quickstart as a user runs it: wall time of the whole command, memory of all processes, and what it learned.

Every run is a new process, `nonet run quickstart`, so Ray's start and all imports are included. `bench_storage` compares its
pretraining in a folder with the same in a bucket.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.bench.timing import LapTimer, find_free_port, run_nonet

_COMPARED = ("stages", "detail", "baselines", "paired", "rewards", "users", "tokenizer", "data", "rows")
_APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
_BESIDE = "roles={rollout: {collocate: trainer}}"
_BUCKET = "s3://bench-runs"
_PRETRAIN = "stages={pretrain: {epochs: 2}}"
Report = dict[str, Any]


def bench_quickstart(seeds: list[int]) -> dict[str, Any]:
    """Run each seed and return seconds, peak PSS, and recall@10 of baselines and stages; ratios of the means over seeds."""
    rows, reports = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            report, seconds = _run_quickstart(Path(folder) / str(seed), f"seed={seed}")
            reports.append(report)
            rows.append(
                {
                    "seed": seed,
                    "wall_s": seconds,
                    "peak_GB": report["peak_rss_bytes"] / 1e9,
                    **_read_recalls(report),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "ratio": _summarise_ratios(reports, rows)}


def bench_repeat(seeds: list[int]) -> dict[str, Any]:
    """Run the same seed twice, with every role in a process of its own, and collocated, and compare metrics and weights."""
    seed = seeds[0]
    with tempfile.TemporaryDirectory() as folder:
        first, _ = _run_quickstart(Path(folder) / "first", f"seed={seed}")
        again, _ = _run_quickstart(Path(folder) / "again", f"seed={seed}")
        apart, _ = _run_quickstart(Path(folder) / "apart", f"seed={seed}", _APART)
        beside, _ = _run_quickstart(Path(folder) / "beside", f"seed={seed}", _BESIDE)
        bits = [_read_weight_hashes(Path(folder) / name) for name in ("first", "again", "apart", "beside")]
    rows = [
        {
            "run": name,
            "same metrics": all(report[key] == first[key] for key in _COMPARED),
            "same weights, bit for bit": weights == bits[0],
        }
        for name, report, weights in (
            ("again", again, bits[1]),
            ("every role apart", apart, bits[2]),
            ("rollout collocated with the trainer", beside, bits[3]),
        )
    ]
    return {"rows": rows, "ratio": {"runs that differ": float(sum(not row["same metrics"] for row in rows))}}


def bench_storage(seeds: list[int], rounds: int = 5) -> dict[str, Any]:
    """Run the quickstart's pretraining in a folder and in a bucket of a server of this machine, in turn; ratio of the medians."""
    changes = (f"seed={seeds[0]}", _PRETRAIN)
    times: dict[str, list[float]] = {"folder": [], "bucket": []}
    with tempfile.TemporaryDirectory() as folder, _serve_bucket(Path(folder)) as environment:
        for index in range(rounds):
            runs = Path(folder) / f"runs-{index}"
            seconds = {
                "folder": _run_quickstart(runs, *changes)[1],
                "bucket": _time_command((), (*changes, f"storage={_BUCKET}/{index}"), environment),
            }
            print(json.dumps(seconds), flush=True)
            for name, value in seconds.items():
                times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {"run in a": name, "median_s": medians[name], "seconds": values} for name, values in times.items()
    ]
    return {"rows": rows, "ratio": {"bucket / folder": medians["bucket"] / medians["folder"]}}


@contextmanager
def _serve_bucket(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the bucket from a process of its own, and yield the environment of runs that use it, with a cache in a folder."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        create = urllib.request.Request(f"{url}/{_BUCKET.partition('//')[2]}", method="PUT")
        for _ in range(60):
            try:
                urllib.request.urlopen(create).close()
                break
            except OSError:  # it has not started yet
                time.sleep(0.5)
        else:
            raise RuntimeError("the S3 server did not start: pip install 'moto[server]'")
        keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
        yield os.environ | keys | {"AWS_ENDPOINT_URL": url, "NONET_CACHE": str(folder / "cache")}
    finally:
        server.terminate()
        server.wait()


def _run_quickstart(folder: Path, *changes: str) -> tuple[Report, float]:
    """Run the quickstart, and return its report and the seconds."""
    seconds = _time_command(("--run-dir", str(folder)), changes)
    return json.loads((folder / "report.json").read_text(encoding="utf-8")), seconds


def _time_command(
    options: Sequence[str], changes: Sequence[str], environment: Mapping[str, str] | None = None
) -> float:
    """Run `nonet run quickstart` with options and changes of the scenario, and return the seconds."""
    words = [part for change in changes for part in ("--set", change)]
    with LapTimer() as timer:
        run_nonet("run", "quickstart", *options, *words, environment=environment)
    return timer.last_s


def _read_weight_hashes(folder: Path) -> dict[str, str]:
    """Return the hashes of the last commit's files: dense weights, optimizer, sparse rows."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["files"]


def _read_recalls(report: Report) -> dict[str, float]:
    return {name: scores["recall@10"] for name, scores in {**report["baselines"], **report["stages"]}.items()}


def _summarise_ratios(reports: list[Report], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Summarise the reports of all seeds."""

    def average_column(name: str) -> float:
        return statistics.mean(row[name] for row in rows)

    def average_ndcg(name: str) -> float:
        return statistics.mean(
            (report["stages"] | report["baselines"])[name]["ndcg@10"] for report in reports
        )

    rewards = [report["rewards"]["total"] for report in reports]
    return {
        "wall_s, the longest": max(row["wall_s"] for row in rows),
        "peak_GB, the highest": max(row["peak_GB"] for row in rows),
        "recall@10 finetune / popularity": average_column("finetune") / average_column("popularity"),
        "recall@10 finetune / transition counter": average_column("finetune")
        / average_column("transition_counter"),
        "ndcg@10 finetune / transition counter": average_ndcg("finetune")
        / average_ndcg("transition_counter"),
        "recall@10 rl / finetune": average_column("rl") / average_column("finetune"),
        "runs where rl is significantly worse than finetune": float(
            sum(report["paired"]["rl-finetune"]["recall@10"]["high"] < 0 for report in reports)
        ),
        "trained reward after / before": statistics.mean(after / before for before, after, *_ in rewards),
        "runs where the trained reward is significantly up": float(sum(low > 0 for _, _, low, _ in rewards)),
    }
