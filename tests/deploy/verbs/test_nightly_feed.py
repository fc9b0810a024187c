"""The scenario nightly-feed-laptop against stand-ins for all its services, in a cluster of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from nonet.controller.record.journal import read_journal
from nonet.controller.scenario.scenario import load_scenario, read_document

NONET = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]


def leaves(document, path=()):
    """Yield the paths of all values of a document."""
    if not isinstance(document, dict) or not document:
        yield path
        return
    for key, value in document.items():
        yield from leaves(value, (*path, key))


def test_the_laptop_s_scenario_changes_only_sizes_addresses_and_what_stand_ins_cannot_do():
    found = read_document("nightly-feed-laptop")
    base = read_document("nightly-feed").document
    assert set(found.document) == set(base)
    changed = {
        ".".join(path) for path, origin in found.origins.items() if origin.startswith("nightly-feed-laptop:")
    }
    removed = {".".join(path) for path in leaves(base)} - {".".join(path) for path in leaves(found.document)}
    assert removed == {"pools.gpu.env.image"}
    sizes = {
        *("data.history", "sparse.defaults.dim", "sparse.tables.sku.dim", "sparse.tables.sku.budget"),
        *("roles.trainer.workers", "roles.rollout.workers.min", "roles.rollout.workers.max"),
        *("stages.pretrain.tokens", "stages.pretrain.batch.tokens", "stages.pretrain.lr.peak"),
        *("stages.rl.steps", "stages.rl.users", "stages.rl.rollout.width", "stages.rl.between"),
        *("stages.rl.rewards.ctr.workers", "stages.rl.rewards.margin.timeout_s"),
        *("evaluate.every", "checkpoint.every"),
    }
    assert changed <= sizes | {"name", "model.path", "model.attention", "pools.gpu.device"}
    scenario, _ = load_scenario("nightly-feed-laptop")
    assert scenario.roles["trainer"].engine.get_options()["zero"] == 2
    assert (scenario.model.get_options()["attention"], scenario.roles["rollout"].pool) == ("sdpa", "npu")


def nonet(feed, *words, timeout_s=1800):
    folder, environment = feed
    done = subprocess.run(
        [*NONET, *words], capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=folder
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(feed):
    """Run the scenario with its records in a local folder, and return the folder."""
    folder, _ = feed
    nonet(feed, "run", "feed.yaml", "--set", "storage=null", "--run-dir", "whole")
    return folder / "whole"


def _count_trained_groups(journal, steps):
    """Return how often every prompt group of RL was trained, which must be equally often."""
    groups = [record for record in read_journal(journal) if "group" in record]
    trained = Counter(n for record in groups if record["group"] == "committed" for n in record["numbers"])
    assert set(trained) == set(range(groups[0]["of"] * steps))
    (count,) = set(trained.values())
    return count


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_part_of_the_scenario_takes_part_in_the_run(feed, finished):
    folder, _ = feed
    report = json.loads((finished / "report.json").read_text())
    assert set(report["stages"]) >= {"pretrain", "finetune", "rl"}
    plan = json.loads((finished / "plan.json").read_text())
    groups = {role: group for group in plan["groups"] for role in group["roles"]}
    assert (groups["rollout"]["device"], groups["rollout"]["workers"], groups["trainer"]["workers"]) == (
        "npu",
        2,
        2,
    )
    metrics: dict[str, list[float]] = {}
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["stage"] == "rl":
            metrics.setdefault(record["name"], []).append(record["value"])
    assert len(metrics["mismatch/kl.npu"]) == 20
    assert max(metrics["mismatch/kl.npu"]) < 0.02
    assert set(metrics["staleness"]) <= {0, 1}
    assert max(metrics["staleness"]) == 1
    assert all(0 < value < 1 for value in metrics["reward.ctr"])
    assert {"reward.margin", "multiplier.margin", "validation reward.margin", "validation ndcg@10"} <= set(
        metrics
    )
    assert _count_trained_groups(finished / "journal.jsonl", steps=20) == 1
    assert report["data"]["users"] == 400
    assert any((folder / "cache" / "fetched").iterdir()), "the backbone and the ranker were fetched"
    stored = (finished / "scenario.yaml").read_text()
    assert "extends" not in stored
    assert "AWS" not in stored


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_verbs_of_a_finished_run_work(feed, finished):
    recommended = nonet(feed, "recommend", str(finished), "--user", "1")
    assert "10" in recommended
    nonet(feed, "report", str(finished))
    nonet(feed, "export", str(finished), "exported")
    example = subprocess.run(
        [sys.executable, "example.py"], cwd=feed[0] / "exported", capture_output=True, text=True, timeout=300
    )
    assert example.returncode == 0, example.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_in_object_storage_whose_driver_is_killed_in_rl_is_resumed(feed):
    folder, environment = feed
    changes = ["--set", "stages.rl.steps=30", "--set", "stages.pretrain.tokens=4e4"]
    with (folder / "killed.txt").open("w") as log:
        driver = subprocess.Popen(
            [*NONET, "run", "feed.yaml", *changes], stdout=log, stderr=log, env=environment, cwd=folder
        )
    deadline = time.monotonic() + 1200
    while "\nrl 1" not in (folder / "killed.txt").read_text():
        assert driver.poll() is None, (folder / "killed.txt").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(1)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    nonet(feed, "resume", "last")
    assert "s3://feed-runs/nightly-feed-laptop-" in nonet(feed, "report", "last")
    (journal,) = (folder / "cache").glob("*/nightly-feed-laptop-*/journal.jsonl")
    assert _count_trained_groups(journal, steps=30) == 1
