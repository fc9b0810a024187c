"""A hundred seeded faults of every kind on the quickstart and on nightly-feed-laptop (`-s` shows the times)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests_ring import make_ring

from nonet.deploy.after.chaos import KINDS_BY_TARGET

NONET = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]
DEADLINES = ("deadlines.step=15", "deadlines.save=30")
SHORT = ("stages.rl.control=false", *DEADLINES)
QUICKSTART = ("stages.pretrain.epochs=1", "stages.finetune.epochs=1", "checkpoint.every=4", *SHORT)
RING = (
    "stages.rl.steps=80",
    "checkpoint.every=2",
    "storage=s3://feed-runs/ring",
    "roles={rollout: {workers: 1}, embedding: {workers: 1}}",
    *SHORT,
)


def run_chaos(
    environment: dict[str, str],
    folder: Path,
    scenario: str,
    times: int,
    *words: str,
    changes: tuple[str, ...],
) -> dict[str, Any]:
    """Run `nonet chaos` and return its result, whose page is in `folder`."""
    began = time.monotonic()
    sets = [word for change in changes for word in ("--set", change)]
    command = [*NONET, "chaos", scenario, "--times", str(times), "--run-dir", str(folder), *words, *sets]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=2700, env=environment, cwd=folder.parent
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    result = json.loads(done.stdout)
    print(f"{scenario}: {len(result['faults'])} faults in {(time.monotonic() - began) / 60:.1f} minutes")
    return result


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_hundred_faults_of_every_kind_lose_and_double_nothing(feed, tmp_path: Path):
    folder, environment = feed
    without_cluster = {
        key: value for key, value in environment.items() if key not in ("RAY_ADDRESS", "NONET_ATTENTION")
    }
    began = time.monotonic()
    results = {
        "nightly": run_chaos(
            environment,
            tmp_path / "nightly",
            str(folder / "feed.yaml"),
            32,
            *("--kill", ",".join(KINDS_BY_TARGET), "--nodes-return", "--seed", "11"),
            changes=("checkpoint.every=4", "stages.rl.control={rerank: true}", *DEADLINES),
        ),
        "ring": run_chaos(
            without_cluster,
            tmp_path / "ring",
            str(make_ring(tmp_path) / "ring.yaml"),
            40,
            "--seed",
            "12",
            changes=RING,
        ),
        "quickstart": run_chaos(
            without_cluster, tmp_path / "quickstart", "quickstart", 42, "--seed", "13", changes=QUICKSTART
        ),
    }
    print(f"{(time.monotonic() - began) / 60:.1f} minutes in all")
    seconds = defaultdict[str, list[float]](list)
    for result in results.values():
        assert result["lost"] == []
        for fault in result["faults"]:
            if fault["victim"]:
                seconds[f"{fault['kind']} {fault['target']}"].append(fault["recovery_s"] or 0.0)
    for name, values in sorted(seconds.items()):
        print(f"{name:<18} {len(values):>3}  median {median(values):.1f} s, at most {max(values):.1f} s")
    hits = {
        name: sum(bool(fault["victim"]) for fault in result["faults"]) for name, result in results.items()
    }
    print(hits)
    assert sum(hits.values()) >= 100
    assert hits["nightly"] >= 20
    moments = {fault["moment"] for result in results.values() for fault in result["faults"]}
    assert moments == {"step", "save", "publish"}
    kinds = {f"{kind} {target}" for target, kinds in KINDS_BY_TARGET.items() for kind in kinds}
    assert seconds.keys() == kinds
