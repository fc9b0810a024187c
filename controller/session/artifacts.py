"""The artifacts of a run (its sequences, semantic ids and catalogue), and the settings of stages for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.plan import Plan
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, check_validation_interval
from nonet.controller.setup import (
    ReadingFacts,
    find_warm_start,
    get_trained_counts,
    make_data_setup,
    make_stage_setups,
)
from nonet.deadlines import Deadline
from nonet.suggest import join_names
from nonet.workers.roles import StageSetup
from nonet.workers.roles.artifacts import PREPARING
from nonet.workers.runtime import GroupFuture

if TYPE_CHECKING:
    from nonet.controller.session.bound_run import BoundRun

_POLL_S = 0.2  # interval at which the progress file is read
_SHARED_KINDS = {"sids": "semantic ids", "transitions": "the memory's counts"}
_REPORT_EVERY_S = 10.0  # smallest interval between two lines of progress


def open_artifacts(bound_run: BoundRun, folder: Path) -> dict[str, Any]:
    """Make the sequences, semantic ids and catalogue unless the run has them, and return the facts about them.

    Args:
        bound_run: The run.
        folder: The folder of the scenario's `file.py` references.
    """
    run, log = bound_run.processes.run, bound_run.checkpoint_log
    facts = run.read_facts()
    if facts is None or not all(map(log.has_file, list_artifact_files(run, facts))):
        facts = make_artifacts(bound_run, folder)
    ReadingFacts.from_scenario(bound_run.processes.scenario).store(run, facts)
    return facts


def make_artifacts(bound_run: BoundRun, folder: Path) -> dict[str, Any]:
    """Run the tokenise stage, and wait for it.

    Args:
        bound_run: The run whose workers run the stage.
        folder: The folder of the scenario's `file.py` references.

    Returns:
        The facts about the artifacts; with a warm start, `init` describes the checkpoint that the run starts from.
    """
    processes, run = bound_run.processes, bound_run.processes.run
    warm_start = find_warm_start(processes.scenario)
    data = make_data_setup(processes.scenario, folder, warm_start and warm_start.known)
    group = processes.group("tokenise")
    group.hosts.wait_until_ready()
    with bound_run.checkpoint_log.leave_out("artifacts"):  # incomplete until the stage ends
        facts = _wait_for_tokenise(
            group.prepare(data, str(run.path)),
            partial(group.hosts.read_file, str(run.path / "artifacts" / PREPARING)),
            processes.deadlines.tokenise,
            bound_run.add_note,
        )
    for note in _describe_cache(facts.pop("cache", {})):
        bound_run.add_note(note)
    bound_run.require_stored(*list_artifact_files(run, facts))
    if warm_start is not None:
        facts["init"] = warm_start.as_dict() | facts.get("init", {})
    return facts


def _describe_cache(cache: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what the tokenise stage took from the cache of artifacts, and what did not work."""
    for run in dict.fromkeys(cache.get("taken", {}).values()):
        kinds = [_SHARED_KINDS.get(kind, kind) for kind, maker in cache["taken"].items() if maker == run]
        yield f"data: {join_names(kinds)} are those that run {run} made of the same data"
    yield from (f"data.cache: {problem}" for problem in cache.get("problems", ()))


def list_artifact_files(run: RunFolder, facts: Mapping[str, Any]) -> list[Path]:
    """Return the files of the artifacts that are the run's own; the folder of one whose files an earlier version did not list."""
    return [
        Path(artifact["path"]) / name
        for artifact in facts["artifacts"].values()
        if Path(artifact["path"]).is_relative_to(run.path)
        for name in artifact.get("files", ("",))
    ]


def list_artifact_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each artifact, by kind."""
    return {kind: artifact["sha256"] for kind, artifact in facts["artifacts"].items()}


def make_run_stages(scenario: Scenario, facts: Mapping[str, Any], plan: Plan) -> dict[str, StageSetup]:
    """Return the settings of every stage, by name, for the data that `facts` describes.

    Raises:
        ConfigError: The validation interval is longer than every validated stage.
    """
    chunks = {name: plan.find_chunk(name, "trainer") for name in scenario.stages}
    init = facts.get("init", {})
    counts = get_trained_counts(facts["data"])
    stages = make_stage_setups(scenario, **counts, chunks=chunks, first_step=init.get("step", 0))
    if init.get("keeps_optimizer"):
        first = next(iter(stages))
        stages[first] = replace(stages[first], continues=init["commit"])
    if "new" not in facts["data"]:  # the few steps of a continued run may be validated at their end only
        check_validation_interval(scenario, {name: stage.steps for name, stage in stages.items()})
    return stages


def _wait_for_tokenise(
    future: GroupFuture,
    read_progress: Callable[[], bytes | None],
    deadline: Deadline,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Wait for the tokenise stage and report its progress; the deadline counts from the last progress.

    Args:
        future: The running call of the tokenise stage.
        read_progress: Returns the content of the file in which the stage reports its progress, None if there is none.
        deadline: The longest time without progress.
        report_progress: Called with a line of progress at most every 10 seconds.

    Returns:
        The result of the call: the facts about the artifacts.

    Raises:
        DeadlineExceeded: There was no progress within the deadline.
    """
    done_rows, progress_time = -1, time.monotonic()
    report_time = progress_time
    while not future.done() and time.monotonic() - progress_time < float(deadline):
        time.sleep(_POLL_S)
        content = read_progress()
        progress = json.loads(content) if content else None
        if progress is None or progress["rows"] == done_rows:
            continue
        done_rows, progress_time = progress["rows"], time.monotonic()
        if progress_time - report_time > _REPORT_EVERY_S:
            report_time = progress_time
            report_progress(progress["text"])
    return future.get(deadline)
