"""What a disturbed run lost, doubled or computed otherwise, compared with an undisturbed one.

The bits of an RL stage with `staleness`, and of the stages after it, cannot be reproduced (docs/explanation/rl.md). Of these
stages, the steps, the prompt groups, the ends of the stages and the readable checkpoints are compared. A resume cuts the journal,
which the controller writes, so that it cannot tell of a step that a trainer took twice. The optimizer's own count of updates can.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nonet.controller.record import (
    Checkpoints,
    RunFolder,
    list_subjects_beside,
    make_rerank_name,
    read_journal,
)
from nonet.controller.scenario import Scenario
from nonet.errors import NonetError
from nonet.storage import fetch

_OPTIMIZER = re.compile(r"dense/optimizer.*\.safetensors")
_PLACE = ("stage", "stage_step", "last", "artifacts")  # keys of a manifest


def list_free_stages(scenario: Scenario) -> list[str]:
    """Return the stages whose bits cannot be reproduced: those from the first with `staleness` on."""
    names = list(scenario.stages)
    for index, name in enumerate(names):
        rollout = getattr(scenario.stages[name], "rollout", None)
        if rollout is not None and rollout.get_options().get("staleness"):
            return names[index:]
    return []


def list_differences(calm: RunFolder, disturbed: RunFolder, free_stages: Collection[str] = ()) -> list[str]:
    """Compare a disturbed run with an undisturbed one.

    Args:
        calm: The undisturbed run.
        disturbed: The disturbed run.
        free_stages: The stages whose bits cannot be reproduced.

    Returns:
        One text per checkpoint file, step, prompt group, version or evaluation that is missing, doubled or different.
    """
    return [
        *_compare_checkpoints(calm, disturbed, free_stages),
        *_compare_steps(calm, disturbed),
        *_compare_groups(calm, disturbed),
        *_compare_updates(calm, disturbed, free_stages),
        *_compare_results(calm, disturbed, free_stages),
    ]


def _compare_checkpoints(
    calm: RunFolder, disturbed: RunFolder, free_stages: Collection[str]
) -> Iterator[str]:
    """Yield differences of the checkpoints, and checkpoints of the disturbed run that cannot be read.

    Numbers of versions need not be equal: a stage that is resumed publishes its weights once more, under the next number.
    They must not go back.
    """
    expected, actual = _read_manifests(calm), _read_manifests(disturbed)
    for manifests, run in ((expected, "undisturbed"), (actual, "disturbed")):
        if not manifests:
            yield f"the {run} run has no checkpoint, so nothing can be compared"
    for step in sorted(expected.keys() | actual.keys()):
        manifest = expected.get(step) or actual[step]
        if manifest["stage"] in free_stages:
            continue
        if step not in actual or step not in expected:
            run = "disturbed" if step in actual else "undisturbed"
            yield f"checkpoint {step}: only in the {run} run"
            continue
        for key, value in _select_bits(expected[step]).items():
            if _select_bits(actual[step]).get(key) != value:
                yield f"checkpoint {step}: {key} differs"
    for stage in free_stages:
        ends = [
            sum(manifest["stage"] == stage and manifest["last"] for manifest in manifests.values())
            for manifests in (expected, actual)
        ]
        if ends[0] != ends[1]:
            yield f"{stage}: {ends[0]} checkpoints end it undisturbed, {ends[1]} disturbed"
    versions = [manifest["version"] for _, manifest in sorted(actual.items())]
    if versions != sorted(versions):
        yield f"versions of the disturbed run's checkpoints go back: {versions}"
    checkpoints = Checkpoints(disturbed.checkpoints)
    for step in sorted(actual):
        try:
            checkpoints.find_at_step(step)  # fetches its files from object storage, and compares their hashes
        except NonetError as error:
            yield f"checkpoint {step} of the disturbed run cannot be read: {error}"


def _compare_steps(calm: RunFolder, disturbed: RunFolder) -> Iterator[str]:
    """Yield steps that were applied more than once, and differences between the applied steps."""
    for run, name in ((calm, "undisturbed"), (disturbed, "disturbed")):
        counts = Counter(step for step, _ in list_applied_steps(run))
        yield from (
            f"step {step}: applied {count} times in the {name} run"
            for step, count in counts.items()
            if count > 1
        )
    if (steps := list_applied_steps(calm)) != (others := list_applied_steps(disturbed)):
        yield f"journal: {len(steps)} steps undisturbed, {len(others)} disturbed, or in another order"


def _compare_groups(calm: RunFolder, disturbed: RunFolder) -> Iterator[str]:
    """Yield prompt groups of stages with `staleness` that the disturbed run trained another number of times than once."""
    expected, actual = _count_trained_groups(calm), _count_trained_groups(disturbed)
    for stage, number in sorted(expected.keys() | actual.keys()):
        if (count := actual[stage, number]) != 1 or not expected[stage, number]:
            yield f"{stage}: prompt group {number} was trained {count} times in the disturbed run"


def _compare_updates(calm: RunFolder, disturbed: RunFolder, free_stages: Collection[str]) -> Iterator[str]:
    """Yield checkpoints whose trainer took another number of updates than its steps need, by the undisturbed run."""
    for stage in free_stages:
        expected, actual = (_count_updates(run, stage) for run in (calm, disturbed))
        per_step = {updates / steps for steps, updates in expected.values()}
        if len(per_step) != 1:  # the optimizer does not count updates, or some steps took none
            continue
        (rate,) = per_step
        for step, (stage_steps, updates) in sorted(actual.items()):
            if updates != rate * stage_steps:
                yield f"checkpoint {step}: {updates} updates by its optimizer, {rate * stage_steps:g} by its steps"


def _count_updates(run: RunFolder, stage: str) -> dict[int, tuple[int, int]]:
    """Return (steps of a stage, updates that its optimizer counts) of each readable checkpoint, by global step."""
    counts = {}
    for step, manifest in _read_manifests(run).items():
        files = [name for name in manifest["files"] if _OPTIMIZER.fullmatch(name)]
        if manifest["stage"] == stage and manifest["stage_step"] and files:
            try:
                updates = [_read_updates(run.checkpoints / f"step-{step:06d}" / name) for name in files]
            except (OSError, NonetError, SafetensorError):
                continue  # `_compare_checkpoints` says that it cannot be read
            if max(updates):
                counts[step] = (manifest["stage_step"], max(updates))
    return counts


def _read_updates(file: Path) -> int:
    """Return the highest number of updates that an optimizer's file counts for a weight; 0 if it counts none."""
    fetch(file)
    with safe_open(file, "np") as tensors:
        names = [name for name in tensors.keys() if name.endswith(".step")]  # noqa: SIM118 (it is no dict)
        return max((int(tensors.get_tensor(name)) for name in names), default=0)


def _compare_results(calm: RunFolder, disturbed: RunFolder, free_stages: Collection[str]) -> Iterator[str]:
    """Yield the subjects whose ranks are missing or differ, and the stages and controls whose validations do."""
    expected, actual = _hash_results(calm), _hash_results(disturbed)
    free_subjects = {
        subject for stage in free_stages for subject in (stage, *list_subjects_beside(stage))
    } - {make_rerank_name(stage) for stage in list(free_stages)[:1]}
    for name in sorted(expected.keys() | actual.keys()):
        subject, is_ranks = name.partition(".")[0], name.endswith(".npz")
        shown = f"ranks of {name.removesuffix('.npz')}" if is_ranks else f"validations of {subject}"
        if subject in free_subjects:
            if name == f"{subject}.npz" and subject in free_stages and name not in actual:
                yield f"{shown} are missing"
        elif expected.get(name) != actual.get(name):
            yield f"{shown} differ"


def _read_manifests(run: RunFolder) -> dict[int, dict[str, Any]]:
    """Return the manifest of each checkpoint by global step."""
    manifests = [json.loads(path.read_bytes()) for path in run.checkpoints.glob("step-*/manifest.json")]
    return {manifest["step"]: manifest for manifest in manifests}


def _select_bits(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal of a checkpoint: its place in the run, and the hashes of its files."""
    return {key: manifest[key] for key in _PLACE} | manifest["files"]


def list_applied_steps(run: RunFolder) -> list[tuple[int, str]]:
    """Return (global step, stage) of the applied steps of a run, in the order of its journal."""
    return [
        (record["applied"], record["stage"]) for record in read_journal(run.journal) if "applied" in record
    ]


def _count_trained_groups(run: RunFolder) -> Counter[tuple[str, int]]:
    """Return how often each (stage, prompt group) was trained."""
    return Counter(
        (record["stage"], number)
        for record in read_journal(run.journal)
        if record.get("group") == "committed"
        for number in record["numbers"]
    )


def _hash_results(run: RunFolder) -> dict[str, str]:
    """Return the SHA-256 of the ranks of each subject that was evaluated, and of the validations of each stage, by file name."""
    files = [path for path in run.results.glob("*.npz") if ".valid." not in path.name]
    files += run.results.glob("*.validation.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
