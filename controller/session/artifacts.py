"""The artifacts of a run (its sequences, semantic ids and catalogue) and what follows from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nonet.controller.plan import Plan
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, check_validation_interval
from nonet.controller.session.interface import RunningSession
from nonet.controller.setup import find_warm_start, make_data_setup, make_stage_setups
from nonet.deadlines import Deadline
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture

_POLL_S, _REPORT_S = 0.2, 10.0


def make_artifacts(session: RunningSession, folder: Path) -> dict[str, Any]:
    """Run the tokenise stage.

    Args:
        session: The session whose workers run the stage.
        folder: The folder of the scenario's `file.py` references.

    Returns:
        The facts about the artifacts, with those of the checkpoint that the run starts from.
    """
    start = find_warm_start(session.scenario)
    data = make_data_setup(session.scenario, folder, start and start.known)
    group = session.groups.group("tokenise")
    group.hosts.wait_until_ready()
    facts = _wait_for_tokenise(
        group.prepare(data, str(session.run.path)), session.run, session.deadlines.tokenise, session.add_note
    )
    if start is not None:
        facts["init"] = start.as_dict() | facts.get("init", {})
    return facts


def list_artifact_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of the artifacts, by kind."""
    return {kind: artifact["sha256"] for kind, artifact in facts["artifacts"].items()}


def make_run_stages(scenario: Scenario, facts: Mapping[str, Any], plan: Plan) -> dict[str, StageSetup]:
    """Return the settings of every stage for the data that `facts` describes.

    Raises:
        ConfigError: A stage has fewer steps than its validation interval.
    """
    chunks = {name: plan.find_chunk(name, "trainer") for name in scenario.stages}
    data, first = facts["data"], facts["init"]["step"] if "init" in facts else 0
    stages = make_stage_setups(scenario, data["users"], data["trained_events"], chunks, first)
    check_validation_interval(scenario, {name: stage.steps for name, stage in stages.items()})
    return stages


def _wait_for_tokenise(
    future: GroupFuture, run: RunFolder, deadline: Deadline, report_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the tokenise stage and report its progress; the deadline counts from the last progress.

    Args:
        future: The call of the tokenise stage.
        run: The folder of the run, which has a progress file.
        deadline: The longest time without progress.
        report_progress: Receives a line of progress at most every 10 seconds.

    Returns:
        The result of the tokenise stage.

    Raises:
        DeadlineExceeded: There was no progress within the deadline.
    """
    rows, progressed = -1, time.monotonic()
    reported = progressed
    while not future.done() and time.monotonic() - progressed < float(deadline):
        time.sleep(_POLL_S)
        report = None
        with contextlib.suppress(FileNotFoundError):  # the file is deleted when all rows are done
            report = run.read_json("artifacts/preparing.json")
        if report is None or report["rows"] == rows:
            continue
        rows, progressed = report["rows"], time.monotonic()
        if progressed - reported > _REPORT_S:
            reported = progressed
            report_progress(report["text"])
    return future.get(deadline)
