"""A hundred seeded faults of every kind on the quickstart and on nightly-feed-laptop (`-s` shows the times)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
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


@dataclass
class Scene:
    """A scenario that is disturbed.

    Attributes:
        times: The number of faults that are drawn.
        hits: The number that must reach a process; a run may end before the last ones.
        words: Further arguments of `nonet chaos`.
        changes: Changes of the scenario.
    """

    times: int
    hits: int
    words: tuple[str, ...]
    changes: tuple[str, ...]


SCENES = {
    "nightly": Scene(
        32,
        20,
        ("--kill", ",".join(KINDS_BY_TARGET), "--nodes-return", "--seed", "11"),
        ("checkpoint.every=4", "stages.rl.control={rerank: true}", *DEADLINES),
    ),
    "ring": Scene(44, 40, ("--seed", "12"), RING),
    "quickstart": Scene(44, 40, ("--seed", "13"), QUICKSTART),
}
assert sum(scene.hits for scene in SCENES.values()) == 100


@pytest.fixture(scope="module")
def kinds_seen() -> set[str]:
    """Return the kinds of faults and their moments, which the tests of this module add."""
    return set()


@pytest.mark.slow
@pytest.mark.timeout(2800)
@pytest.mark.parametrize("name", SCENES)
def test_faults_of_every_kind_lose_and_double_nothing(name: str, feed, kinds_seen: set[str], tmp_path: Path):
    folder, environment = feed
    scenario = {"nightly": str(folder / "feed.yaml"), "quickstart": "quickstart"}.get(name)
    if scenario is None:
        scenario = str(make_ring(tmp_path) / "ring.yaml")
    if name != "nightly":  # It runs on a local Ray of its own.
        environment = {k: v for k, v in environment.items() if k not in ("RAY_ADDRESS", "NONET_ATTENTION")}
    scene = SCENES[name]
    result = run_chaos(
        environment, tmp_path / name, scenario, scene.times, *scene.words, changes=scene.changes
    )
    assert result["lost"] == []
    seconds = defaultdict[str, list[float]](list)
    hits = [fault for fault in result["faults"] if fault["victim"]]
    for fault in hits:
        seconds[f"{fault['kind']} {fault['target']}"].append(fault["recovery_s"] or 0.0)
        kinds_seen.add(fault["moment"])
    for kind, values in sorted(seconds.items()):
        print(f"{kind:<18} {len(values):>3}  median {median(values):.1f} s, at most {max(values):.1f} s")
    kinds_seen.update(seconds)
    assert len(hits) >= scene.hits


@pytest.mark.slow
def test_every_kind_of_fault_hit_a_process_at_steps_saves_and_publications(kinds_seen: set[str]):
    kinds = {f"{kind} {target}" for target, kinds in KINDS_BY_TARGET.items() for kind in kinds}
    assert kinds_seen == kinds | {"step", "save", "publish"}
