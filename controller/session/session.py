"""A session holds the worker groups, artifacts and checkpoints of a run. Your own training loop, or a shipped stage, drives it.

    with nonet.Session("quickstart") as s:
        for step, prompts in s.iterate_prompts("rl"):
            beams = s.rollout.generate(prompts)      # references: the data stay with the workers
            s.trainer.update(s.stage, step, beams, s.reward.score(beams))
            s.publish()
            s.commit(step)

Entering the session plans the run, starts its processes, tokenises the data and opens the artifacts; leaving it stops
every process. A run that was killed resumes from the newest complete checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.cluster import ClusterProbes
from nonet.controller.groups import GroupProcesses, RunGroups, plan_live
from nonet.controller.record import (
    CONTROLLER,
    CheckpointLog,
    ChromeTrace,
    RunFolder,
    create_run,
    lock_run,
    open_trace,
)
from nonet.controller.scenario import Scenario, compute_ttl_steps, load_scenario, restore_values
from nonet.controller.session.artifacts import make_run_stages, open_artifacts
from nonet.controller.session.bound_run import BoundRun, write_plan
from nonet.controller.session.scaling import restore_workers
from nonet.controller.session.stage_run import StageRun
from nonet.controller.setup import fix_sources, read_copies, write_run
from nonet.errors import ConfigError, PlacementError, WorkerLost
from nonet.storage import RunWriter, open_writer
from nonet.workers import check_ray_environment
from nonet.workers.runtime import ensure_ray


@dataclass(slots=True)
class SessionProgress:
    """What a session has opened so far, for other threads that show it meanwhile.

    Attributes:
        seconds: The duration of each phase that has ended, by its name.
        probes: The probes of the cluster's nodes and devices, once they exist.
        processes: The processes of the run, once they have started.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    probes: ClusterProbes | None = None
    processes: GroupProcesses | None = None

    @property
    def phase(self) -> str:
        """The phase that has not ended yet; "" if the session is open."""
        return next(
            (phase for phase in ("bind", "tokenise", "open", "restore") if phase not in self.seconds), ""
        )

    def end_phase(self, began: float, trace: ChromeTrace) -> float:
        """Record that the current phase has ended.

        Args:
            began: When it began, in unix seconds.
            trace: The trace of the run.

        Returns:
            When the next phase begins.
        """
        phase, ended = self.phase, time.time()
        self.seconds[phase] = ended - began
        trace.add(CONTROLLER, phase, began, ended)
        return ended


class _ExitStack(ExitStack):
    """An exit stack that keeps the first error: errors of later callbacks become notes of it."""

    def push(self, exit: Any) -> Any:
        """Add a callback that takes the arguments of `__exit__`."""

        def call(kind: object, error: BaseException | None, trace: object) -> None:
            try:
                exit(kind, error, trace)
            except Exception as closing_error:
                if error is None:
                    raise
                error.add_note(f"while closing: {type(closing_error).__name__}: {closing_error}")

        super().push(call)
        return exit

    def push_call(self, close: Callable[..., object], *arguments: object) -> None:
        """Add a call of a function with these arguments."""
        self.push(lambda *_: close(*arguments))


# For type checkers, a session has the attributes of its run, which it passes on once it has been entered.
_Run = StageRun if TYPE_CHECKING else object


class Session(_Run):
    """The worker groups, artifacts and checkpoints of one run, as a context manager for a training loop.

    Once entered, it has the attributes and methods of `StageRun`.

    Args:
        scenario: A Scenario, a path or the name of a shipped scenario.
        folder: The folder that `file.py` references of the scenario start from; by default the folder of the scenario.
        run: The folder of the run, by default a new one. With `resume` it must hold a checkpoint.
        resume: Whether to continue from the newest complete checkpoint.
        changes: Overrides of scenario keys, `key=value`.
        life_s: If 0, the processes of the run end with this process, which locks the folder of the run. If above 0, they
            are detached and end after this many seconds without a heartbeat from this process; then the process that
            started this one must have locked the folder.
        from_run: The run whose weights and sparse rows this run starts from, as `init: {from, stage}` in a scenario.
        stage: The stage of `from_run` whose last checkpoint is used; by default the last stage that ended.
        writer: The open writer of a run in object storage; by default the session opens one for such a run.

    Attributes:
        run: The folder of the run.
        add_note: The function that shows a note of the run to its user.
        record_metrics: The function that records metrics of the controller: (stage, step, values by name).
        progress: What has been opened so far.
        seconds: The duration of each phase of entering, by its name.
        dead_workers: The workers that had died when the session was left with an error.

    Raises:
        ConfigError: On entering, if another process runs in the folder, or the session was entered before.
    """

    def __init__(
        self,
        scenario: Scenario | str | Path,
        *,
        folder: Path | None = None,
        run: RunFolder | None = None,
        resume: bool = False,
        changes: list[str] | None = None,
        life_s: float = 0.0,
        from_run: str | Path | None = None,
        stage: str | None = None,
        writer: RunWriter | None = None,
    ):
        self._running: StageRun | None = None
        self._was_entered = False
        loaded, scenario_folder = (
            (scenario, Path.cwd()) if isinstance(scenario, Scenario) else load_scenario(scenario, changes)
        )
        loaded = fix_sources(loaded, resume=resume, run=run, from_run=from_run, stage=stage)
        self._scenario, _ = restore_values(loaded)  # the values of `env.vars`
        self.folder = folder or scenario_folder
        self.run = run or create_run(loaded.name, storage_address=loaded.storage and loaded.storage.url)
        self.resume = resume
        self._writer, self._life_s = writer, life_s
        self.progress = SessionProgress()
        self.seconds = self.progress.seconds
        self.dead_workers: list[str] = []
        self.add_note: Callable[[str], None] = lambda text: None
        self.record_metrics: Callable[[str, int, Mapping[str, float]], None] = lambda stage, step, values: (
            None
        )
        self._exit_stack = _ExitStack()  # closes what was opened, the newest first

    @property
    def scenario(self) -> Scenario:
        """The scenario; once entered, with the run's copies of the user's own files."""
        return self._running.scenario if self._running else self._scenario

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the run, once its processes have opened the artifacts."""
        if name.startswith("_") or self._running is None:
            raise AttributeError(f"a session has no {name!r} before it is entered")
        return getattr(self._running, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the session itself, because one of the run would be hidden here and stay as it is there."""
        if not name.startswith("_") and name not in self.__dict__ and "_exit_stack" in self.__dict__:
            raise AttributeError(f"{name!r} of a session cannot be set; call the methods of the session")
        super().__setattr__(name, value)

    def __enter__(self) -> Session:
        if self._was_entered:
            raise ConfigError("a session is entered once; make another, with the same run and resume=True")
        self._was_entered, began, end_phase = True, time.time(), self.progress.end_phase
        with self._exit_stack:  # if a phase fails, what was opened is closed
            bound_run = self._bind()
            began = end_phase(began, bound_run.trace)
            facts = open_artifacts(bound_run, self.folder)
            began = end_phase(began, bound_run.trace)
            running = _open_groups(bound_run, facts)
            began = end_phase(began, bound_run.trace)
            running.restore()
            end_phase(began, bound_run.trace)
            self._exit_stack.push(running.finish)
            self._running, self._exit_stack = running, self._exit_stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: Any) -> None:
        self._exit_stack.__exit__(kind, value, trace)

    def close(self) -> None:
        """Wait for an open checkpoint, and stop every process of the run, which can be resumed from its folder."""
        self._exit_stack.close()

    def _bind(self) -> BoundRun:
        """Write the folder of the run, plan on the live cluster, and start the processes of the stage to begin with."""
        check_ray_environment()
        writer = self._lock_folder() if not self._life_s else self._writer
        ensure_ray()
        scenario = self._scenario
        scenario_sha256 = write_run(scenario, self.folder, self.run)
        scenario = scenario.relocate(read_copies(self.run))
        log = CheckpointLog(self.run, scenario_sha256, scenario.checkpoint.keep.last, writer)
        trace = open_trace(self.run.trace)
        self._exit_stack.push_call(trace.close)
        self._exit_stack.push_call(log.close)
        resumed_from = log.find_resume_checkpoint() if self.resume else None
        scenario = restore_workers(self.run, scenario, resumed_from and resumed_from[1])
        pools = {
            name: scenario.pools[name] for _, name in scenario.list_pool_names() if name in scenario.pools
        }
        probes = ClusterProbes(
            self.run.path, pools, scenario.deadlines.probe, lambda text: self.add_note(text)
        )
        self._exit_stack.push_call(probes.close)
        self.progress.probes = probes
        probes.check()
        try:
            plan = plan_live(scenario)
        except PlacementError as error:
            raise probes.explain(error) from None
        write_plan(self.run, plan, self.add_note)
        if writer:
            writer.commit()  # so that workers find the copies of the user's files
        first_stage = resumed_from[1].stage if resumed_from else next(iter(scenario.stages))
        processes = GroupProcesses(scenario, self.run, plan, self._life_s, trace, first_stage)
        self.progress.processes = processes

        def stop_processes(kind: object, error: BaseException | None, trace: object) -> None:
            """Stop the processes; after an error, remember which workers have died, for `describe_loss`."""
            at_once = True  # if the search for dead workers is interrupted
            try:
                if error is not None:
                    self.dead_workers = processes.binding.list_dead_workers()
                at_once = bool(self.dead_workers)
            finally:
                processes.stop(at_once=at_once)

        self._exit_stack.push(stop_processes)
        if writer:
            writer.collect_from(processes.collect_files)
            self._exit_stack.push_call(writer.collect_from, tuple)
            if writer is not self._writer:
                writer.start_commits()
        return BoundRun(
            processes,
            log,
            trace,
            writer,
            resumed_from,
            lambda text: self.add_note(text),
            lambda *values: self.record_metrics(*values),
        )

    def _lock_folder(self) -> RunWriter | None:
        """Lock the folder of the run, clear it for a new run, and return the writer of a run in object storage."""
        self._exit_stack.push_call(lock_run(self.run).close)
        writer, storage = self._writer, self._scenario.storage
        if writer is None:
            writer = open_writer(
                self.run.path,
                single_writer=storage is not None and storage.single_writer,
                timeout_s=self._scenario.deadlines.storage,
            )
            if writer:
                self._exit_stack.push_call(writer.close)
        if not self.resume:
            self.run.clear_records()
        return writer

    def describe_loss(self, error: Exception) -> str | None:
        """Describe an error that the loss of a worker caused, or return None if no worker was lost."""
        if isinstance(error, WorkerLost) and (error.rank >= 0 or not self.dead_workers):
            return str(error)
        return f"{', '.join(self.dead_workers)} died: {error}" if self.dead_workers else None


def _open_groups(bound_run: BoundRun, facts: dict[str, Any]) -> StageRun:
    """Open the artifacts in all roles and form the process groups."""
    processes = bound_run.processes
    folders_by_kind = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    stages = make_run_stages(processes.scenario, facts, processes.plan)
    steps_by_stage = {name: stage.steps for name, stage in stages.items()}
    ttl_steps_by_table = compute_ttl_steps(processes.scenario, facts["data"], steps_by_stage)
    groups = RunGroups(processes, folders_by_kind, ttl_steps_by_table)
    return StageRun(bound_run, facts, stages, groups)
