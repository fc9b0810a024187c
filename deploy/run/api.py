"""The Python API of scenarios and runs: `nonet.scenario`, `nonet.run`, `nonet.start`.

Ray is only imported when a run starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.cluster import ClusterView, read_local_view
from nonet.controller.plan import Plan, plan
from nonet.controller.record import (
    LAST,
    Checkpoints,
    FolderLock,
    RunFolder,
    create_run,
    describe_place,
    find_run,
    find_runs_root,
    get_location,
    is_ray_job,
    list_runs_by_name,
    lock_run,
    open_for_writing,
)
from nonet.controller.scenario import (
    Scenario,
    find_scenario,
    load_scenario,
    make_scenario,
    put_value,
    read_document,
    restore_values,
    to_document,
)
from nonet.controller.setup import check_same
from nonet.deploy.run.panel import Panel
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles
from nonet.trust import check_folder

if TYPE_CHECKING:
    from nonet.deploy.run.driver import DriverRun


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """A scenario and the folder that its files are relative to. It is immutable: `set` returns a changed copy."""

    scenario: Scenario
    folder: Path

    def set(self, path: str, value: Any) -> ScenarioFile:
        """Return a copy with one key changed.

        For example, `set("stages.rl.rewards.cheap", {"use": cheap, "weight": 0.1})` adds a reward.

        Args:
            path: The key's path, with dots.
            value: The new value.

        Raises:
            ConfigError: The key does not exist, or the value is invalid.
        """
        document = self.scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
        put_value(document, path, value, f"set({path!r})")
        reasons = document.get("settings")  # by key: why its value was derived from the data
        if isinstance(reasons, dict):  # a key that is set here is no longer derived
            document["settings"] = {
                key: reason for key, reason in reasons.items() if not f"{path}.".startswith(f"{key}.")
            }
        return replace(
            self, scenario=make_scenario(document, self.scenario.name, PluginFiles(str(self.folder)))
        )

    def plan(self, view: ClusterView | None = None) -> Plan:
        """Plan the run on a cluster view, by default this machine; `show()` of the result returns its text."""
        return plan(self.scenario, view or read_local_view())

    def as_dict(self) -> dict[str, Any]:
        """Return the scenario as a dictionary without secret values."""
        return to_document(self.scenario)


def scenario(
    source: str | Path, changes: list[str] | None = None, *, stored: Path | None = None
) -> ScenarioFile:
    """Load a scenario.

    Args:
        source: The name of a shipped scenario, or the path of a scenario's file.
        changes: Overrides of scenario keys, each "a.b=c".
        stored: The scenario.yaml of a run that is to be resumed with this scenario; None for a new run.

    Raises:
        ConfigError: The scenario does not exist, or it is invalid.
    """
    loaded, folder = load_scenario(find_scenario(source), changes, stored)
    return ScenarioFile(loaded, folder)


@contextmanager
def continue_scenario(
    source: str | Path, parent: str | Path, changes: list[str] | None = None, *, panel: Panel | None = None
) -> Iterator[ScenarioFile]:
    """Load a scenario that continues a finished run: it trains on the events that are new since that run.

    What `settings: data` derives from the data is taken from that run. With "last", no other process of this machine continues a
    scenario of this name within the context.

    Args:
        source: The name of a shipped scenario, or the path of a scenario's file.
        parent: The run to continue, or "last" for the newest finished run with the name of the scenario, where its runs are
            kept. If there is none, the scenario trains on all events. If a newer run was interrupted, it is resumed first.
        changes: Overrides of scenario keys, each "a.b=c".
        panel: Where the progress of a resumed run, and notes, are shown; by default standard error.

    Yields:
        The scenario.

    Raises:
        ConfigError: The scenario or the run does not exist, it has not finished, or a run of the scenario is in progress.
        KeyboardInterrupt: The resumed run was stopped.
    """
    if str(parent) != LAST:
        run = find_run(parent)
        if not run.report.exists():
            raise ConfigError(
                f"--continue {parent}: {run.id} has not finished; continue it with: nonet resume {run.id}"
            )
        yield _load_continued(source, run, changes)
        return
    document = read_document(source, changes).document
    name, storage = str(document.get("name")), document.get("storage")
    with _lock_name(name):
        run = _finish_last(name, storage.get("url") if isinstance(storage, dict) else storage, panel)
        if run is None:
            with panel or Panel() as open_panel:
                open_panel.print_note(f"no run of {name} has finished yet: training on all events")
        yield scenario(source, changes) if run is None else _load_continued(source, run, changes)


def _load_continued(source: str | Path, run: RunFolder, changes: list[str] | None) -> ScenarioFile:
    """Load a scenario that continues a run, whose code has been approved."""
    place = json.dumps(get_location(run))  # a quoted text of YAML
    return scenario(source, [*(changes or []), f"init.from={place}", "init.train=new"], stored=run.scenario)


def _lock_name(name: str) -> FolderLock:
    """Lock the name of a scenario whose newest run is continued. Raises ConfigError if another process of this machine has."""
    try:
        return lock_run(RunFolder(find_runs_root() / f".{name}"))
    except ConfigError:
        raise ConfigError(f"--continue last: another process continues {name}; wait for its end") from None


def _finish_last(name: str, address: str | None, panel: Panel | None) -> RunFolder | None:
    """Resume the newest run of a name if it was interrupted; return the newest finished one, if there is one.

    Raises:
        ConfigError: A run of the name is in progress.
        KeyboardInterrupt: The resumed run was stopped.
    """
    from nonet.deploy.run.status import is_in_progress

    unfinished: list[RunFolder] = []
    finished: RunFolder | None = None
    for run in list_runs_by_name(name, address):
        if run.report.exists():
            finished = run
            break
        if is_in_progress(run):
            raise ConfigError(
                f"--continue last: {run.id} is in progress; wait for it, or stop it: nonet stop {get_location(run)}"
            )
        unfinished.append(run)
    for run in unfinished:
        place = get_location(run)
        if Checkpoints(find_run(place).checkpoints, fetches=False).find_newest() is not None:
            if resume(place, panel=panel).state == "stopped":
                raise KeyboardInterrupt
            finished = run
            break
    return finished and find_run(get_location(finished))


def start(
    source: ScenarioFile | str | Path, *, run_dir: str | Path | RunFolder | None = None, command: str = ""
) -> DriverRun:
    """Start a run without waiting for it; `wait()` of the result blocks.

    Args:
        source: A scenario, the name of a shipped one, or a path.
        run_dir: The run's folder, by default a new one; a RunFolder if the run has an id already.
        command: The command line that the report shows.

    Returns:
        The run in progress.
    """
    scenario_file = source if isinstance(source, ScenarioFile) else scenario(source)
    return _start(
        scenario_file.scenario,
        scenario_file.folder,
        _create_run(scenario_file.scenario, run_dir),
        command=command,
    )


def _start(*args: Any, **options: Any) -> DriverRun:
    """Call `driver.start`, which is imported only here because it imports Ray."""
    from nonet.deploy.run import driver

    return driver.start(*args, **options)


def _create_run(scenario: Scenario, run_dir: str | Path | RunFolder | None) -> RunFolder:
    """Return the folder of a new run of a scenario, or the local copy of a run in object storage."""
    if isinstance(run_dir, RunFolder):
        return run_dir
    return create_run(scenario.name, run_dir, scenario.storage and scenario.storage.url)


def start_detached(
    source: ScenarioFile | str | Path, *, run_dir: str | Path | None = None, command: str = ""
) -> tuple[RunFolder, list[str]]:
    """Start a run on the cluster that RAY_ADDRESS names; it continues without this process.

    Args:
        source: A scenario, the name of a shipped one, or a path.
        run_dir: The run's folder, by default a new one.
        command: The command line that the report shows.

    Returns:
        The run's folder, and warnings about its data.
    """
    from nonet.deploy.run import driver

    scenario_file = source if isinstance(source, ScenarioFile) else scenario(source)
    folder = _create_run(scenario_file.scenario, run_dir)
    return folder, driver.start_detached(
        scenario_file.scenario, scenario_file.folder, folder, command=command
    )


def run(
    source: ScenarioFile | str | Path,
    *,
    run_dir: str | Path | RunFolder | None = None,
    panel: Panel | None = None,
    command: str = "",
) -> DriverRun:
    """Run a scenario to its end and show the progress.

    Args:
        source: A scenario, the name of a shipped one, or a path.
        run_dir: The run's folder, by default a new one; a RunFolder if the run has an id already.
        panel: Where the progress is shown, by default standard error.
        command: The command line that the report shows.

    Returns:
        The finished run.

    Raises:
        NonetError: The run failed, or its input is invalid.
    """
    with panel or Panel() as open_panel:
        started = start(source, run_dir=run_dir, command=command)
        if is_ray_job():
            open_panel.print_note(f"this run's folder: {describe_place(started.folder)}")
        for warning in started.warnings:
            open_panel.print_note(f"warning: {warning}")
        return started.wait(open_panel)


def resume(
    run_name: str | Path,
    *,
    changes: list[str] | None = None,
    scenario_file: ScenarioFile | None = None,
    panel: Panel | None = None,
) -> DriverRun:
    """Continue a run from its newest complete checkpoint.

    Values of env.vars, which a run does not store, come from `changes`, from `scenario_file`, or from the
    environment.

    Args:
        run_name: The run's folder, its id or a prefix of it, or `last` for the newest run.
        changes: Values of env.vars, each "a.b=c".
        scenario_file: The scenario that started the run.
        panel: Where the progress is shown, by default standard error.

    Returns:
        The finished run.

    Raises:
        ConfigError: There is nothing to resume, or the run has another scenario than `scenario_file`.
    """
    folder = find_run(run_name)
    check_same(
        load_scenario(folder.scenario, changes)[0] if scenario_file is None else scenario_file.scenario,
        folder,
    )
    if folder.report.exists():
        raise ConfigError(f"{folder.id} is finished: see {folder.path / 'report.html'}")
    stored, _ = load_scenario(folder.scenario, changes)
    check_folder(folder.path, folder.id)
    if scenario_file is not None:  # deadlines and trackers may differ from those of the run's start
        given = scenario_file.scenario
        stored = stored.model_copy(update={"deadlines": given.deadlines, "tracking": given.tracking})
    loaded, restored_keys = restore_values(stored, scenario_file and scenario_file.scenario)
    with panel or Panel() as open_panel:
        if restored_keys:
            open_panel.print_note(f"env.vars from this process's environment: {', '.join(restored_keys)}")
        return _start(loaded, open_for_writing(folder).sources, folder, resume=True).wait(open_panel)
