"""The Python face of scenarios and runs: `nonet.scenario`, `nonet.run`, `nonet.start`. Ray is loaded where a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.cluster import ClusterView, this_machine
from nonet.controller.plan import Plan, plan
from nonet.controller.record import RunFolder, find_run, in_job, new_run, place_of
from nonet.controller.scenario import Scenario, document, find, load_scenario, make_scenario, put, with_values
from nonet.controller.setup import check_same
from nonet.deploy.run.panel import Panel
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles

if TYPE_CHECKING:
    from nonet.deploy.run.driver import Run


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """A scenario and the folder its files are beside. `set` gives a changed copy."""

    scenario: Scenario
    folder: Path

    def set(self, path: str, value: Any) -> ScenarioFile:
        """A copy with one key changed, e.g. set("stages.rl.rewards.cheap", {"use": cheap, "weight": 0.1})."""
        whole = self.scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
        put(whole, path, value, f"set({path!r})")
        chosen = whole.get("settings")
        if isinstance(chosen, dict):  # what is set here was not chosen by the data
            whole["settings"] = {
                key: why for key, why in chosen.items() if not f"{path}.".startswith(f"{key}.")
            }
        return replace(self, scenario=make_scenario(whole, self.scenario.name, PluginFiles(str(self.folder))))

    def plan(self, view: ClusterView | None = None) -> Plan:
        """The plan on a cluster view, this machine by default; `.show()` is its text."""
        return plan(self.scenario, view or this_machine())

    def as_dict(self) -> dict[str, Any]:
        return document(self.scenario)


def scenario(
    source: str | Path, changes: list[str] | None = None, *, stored: Path | None = None
) -> ScenarioFile:
    """A scenario by shipped name or path; `stored`: that of a run that goes on with it. Raises ConfigError."""
    loaded, folder = load_scenario(find(source), changes, stored)
    return ScenarioFile(loaded, folder)


def start(source: ScenarioFile | str | Path, *, run_dir: str | Path | None = None, command: str = "") -> Run:
    """Start a run and return at once; `.wait()` blocks."""
    chosen = source if isinstance(source, ScenarioFile) else scenario(source)
    return _start(chosen.scenario, chosen.folder, new_run(chosen.scenario.name, run_dir), command=command)


def _start(*args: Any, **more: Any) -> Run:
    from nonet.deploy.run import driver

    return driver.start(*args, **more)


def start_detached(
    source: ScenarioFile | str | Path, *, run_dir: str | Path | None = None, command: str = ""
) -> RunFolder:
    """Start a run that goes on without this process, on the cluster RAY_ADDRESS names; its folder."""
    chosen = source if isinstance(source, ScenarioFile) else scenario(source)
    folder = new_run(chosen.scenario.name, run_dir)
    from nonet.deploy.run import driver

    driver.start_detached(chosen.scenario, chosen.folder, folder, command=command)
    return folder


def run(
    source: ScenarioFile | str | Path,
    *,
    run_dir: str | Path | None = None,
    panel: Panel | None = None,
    command: str = "",
) -> Run:
    """Run a scenario to its end with progress. Raises NonetError."""
    with panel or Panel() as shown:
        started = start(source, run_dir=run_dir, command=command)
        if in_job():
            shown.note(f"this run's folder: {place_of(started.folder)}")
        for warning in started.warnings:
            shown.note(f"warning: {warning}")
        return started.wait(shown)


def resume(
    run_name: str | Path,
    *,
    changes: list[str] | None = None,
    given: ScenarioFile | None = None,
    panel: Panel | None = None,
) -> Run:
    """Go on with a run from its newest whole commit.

    Values of env.vars, which a run does not store, come from `changes`, from `given` (the scenario that began it), or from
    the environment. Raises ConfigError when there is nothing to resume, or where it is of another scenario.
    """
    folder = find_run(run_name)
    check_same(load_scenario(folder.scenario, changes)[0] if given is None else given.scenario, folder)
    if folder.report.exists():
        raise ConfigError(f"{folder.id} is finished: see {folder.path / 'report.html'}")
    stored, _ = load_scenario(folder.scenario, changes)
    if given is not None:
        stored = stored.model_copy(update={"deadlines": given.scenario.deadlines})
    loaded, taken = with_values(stored, given and given.scenario)
    with panel or Panel() as shown:
        if taken:
            shown.note(f"from this environment, for env.vars: {', '.join(taken)}")
        return _start(loaded, folder.sources, folder, resume=True).wait(shown)
