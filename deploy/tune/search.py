"""`nonet tune`: search the values of a scenario's keys for the best validation, and write the best scenario.

Ray Tune runs the jobs: it starts their actors, `parallel` at a time, and notices crashes. Optuna proposes
values (deploy/tune/sampler.py). Rungs (deploy/tune/halving.py) and resuming (deploy/tune/ledger.py) are
implemented here, because Tune's schedulers depend on the order in which trials finish, and its restore
loses trials that ended after its last snapshot.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nonet.atomic import write_whole
from nonet.controller.record import RunFolder, check_no_storage, create_run, lock_run
from nonet.deploy.tune.halving import SuccessiveHalving, TrialJob, TrialResult, compute_rung_shares
from nonet.deploy.tune.ledger import LEDGER_FILE, SearchLedger
from nonet.deploy.tune.picture import draw_search
from nonet.deploy.tune.results import format_header, format_progress
from nonet.deploy.tune.sampler import check_installed, sample_values
from nonet.deploy.tune.space import SearchSpace, read_space
from nonet.deploy.tune.subject import TunedScenario
from nonet.errors import ConfigError, NonetError

_SEARCH_FILES = {LEDGER_FILE, "trials", "ray", "best.yaml", "tune.svg", ".lock", ".holder"}


def tune_scenario(
    source: str | Path,
    space: Path,
    trials: int,
    *,
    changes: list[str] | None = None,
    run_dir: Path | None = None,
    parallel: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Search a scenario's keys, or continue the search in `run_dir`.

    Args:
        source: The scenario's file or name.
        space: The file of the search space.
        trials: Number of trials on the first rung.
        changes: Changes of keys for all trials, each "a.b=c".
        run_dir: The search's folder, by default a new one.
        parallel: Number of jobs at a time.
        say: Receives lines of progress.

    Returns:
        {"search": definition, "results": all results, "best": the best result, "scenario": path of best.yaml,
        "picture": path of tune.svg, "folder": path}; None if the search was interrupted.

    Raises:
        ConfigError: The input is wrong; nothing was started.
        NonetError: The search cannot continue.
    """
    check_installed()
    search_space = read_space(space)
    subject = TunedScenario.read(source, changes, search_space.metric)
    storage = subject.build_scenario({}).storage
    check_no_storage(storage and storage.url, "tune")
    folder = _choose_folder(subject, run_dir)
    warnings = subject.check(search_space)
    rungs = compute_rung_shares(trials, subject.list_lengths)
    rule, seed = subject.rule, subject.build_scenario({}).seed
    propose = partial(sample_values, search_space, seed, trials, rule.lower)
    halving = SuccessiveHalving(
        trials, rungs=len(rungs), lower=rule.lower, parallel=parallel, propose=propose
    )
    search = {
        "trials": trials,
        "parallel": parallel,
        "metric": rule.metric,
        "lower": rule.lower,
        "stage": subject.judged,
        "rungs": [str(share) for share in rungs],
        "sizes": halving.compute_sizes(),
        "space": {key.path: asdict(key) for key in search_space.keys},
        **subject.as_json(),
    }
    with lock_run(RunFolder(folder)):
        ledger = SearchLedger(folder, search)
        say(format_header(search))
        for warning in warnings:
            say(f"warning: {warning}")
        if not ledger.knows_tables:
            say("warning: an earlier version began this search, so nothing shows that its data are the same")
        if ledger.begun:
            say(
                f"{folder}: continuing, {len(ledger.results)} of {sum(halving.compute_sizes())} runs are done"
            )
        else:
            ledger.write()
        if halving.list_jobs(ledger.results):
            _run_jobs(subject, halving, ledger, folder, say)
        if halving.list_jobs(ledger.results):
            say(f"stopped; to continue, run the same command with --run-dir {folder}")
            return None
        return _finish_search(subject, search_space, halving, ledger, folder)


def _choose_folder(subject: TunedScenario, run_dir: Path | None) -> Path:
    """Return the search's folder: `run_dir`, or a new one. Raises ConfigError if it has files but no search."""
    if run_dir is None:
        return create_run(f"{subject.build_scenario({}).name}-tune").path
    folder = run_dir.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose a folder for --run-dir")
    other_files = {path.name for path in folder.iterdir()} - _SEARCH_FILES if folder.exists() else set()
    if other_files and not (folder / LEDGER_FILE).exists():
        raise ConfigError(
            f"{folder} is not empty and has no search; choose an empty or a new folder for --run-dir"
        )
    return folder


def _run_jobs(
    subject: TunedScenario,
    halving: SuccessiveHalving,
    ledger: SearchLedger,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Run jobs with Ray Tune until none is left or the search is interrupted; results go to the ledger.

    Raises:
        NonetError: The search cannot continue.
    """
    os.environ.update(
        TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1", RAY_AIR_NEW_OUTPUT="0", RAY_CHDIR_TO_TRIAL_DIR="0"
    )
    import ray
    from ray import tune

    from nonet.deploy.tune.trial import train_trial
    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    shutil.rmtree(folder / "ray", ignore_errors=True)
    jobs = _JobQueue(halving, ledger, folder, say)
    node_id = ray.get_runtime_context().get_node_id()
    # Trials must not use resources that runs are planned on. Tune needs some resource, so use 0.001 of the node's own.
    resources = {"CPU": 0, f"node:{ray.util.get_node_ip_address()}": 0.001}
    tuner = tune.Tuner(
        tune.with_resources(
            partial(train_trial, subject=subject, node_id=node_id), tune.PlacementGroupFactory([resources])
        ),
        tune_config=tune.TuneConfig(
            search_alg=_make_searcher(jobs),
            num_samples=sum(halving.compute_sizes()),
            max_concurrent_trials=halving.parallel,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="ray", storage_path=str(folder), verbose=0),
    )
    tuner.fit()
    shutil.rmtree(folder / "ray", ignore_errors=True)  # Tune's own files; the ledger has all results
    if jobs.broken:
        raise NonetError(f"{jobs.broken}; to continue, run the same command with --run-dir {folder}")


class _JobQueue:
    """Gives jobs to Ray Tune's trials, which it knows by their names, and records the results.

    Attributes:
        broken: Why the search cannot continue; None if it can.
    """

    def __init__(
        self, halving: SuccessiveHalving, ledger: SearchLedger, folder: Path, say: Callable[[str], None]
    ):
        self._halving, self._ledger, self._folder, self._say = halving, ledger, folder, say
        self._open_jobs: dict[str, TrialJob] = {}  # by the name of Ray Tune's trial
        self.broken: str | None = None

    def get_next(self, name: str) -> str | None:
        """Open the next job under a name, and return it as JSON.

        The result is "" if the next job depends on the results of open ones, and None if there is no job left.
        """
        open_jobs = {(job.number, job.rung) for job in self._open_jobs.values()}
        if self.broken:
            return None
        waiting_jobs = [
            job
            for job in self._halving.list_jobs(self._ledger.results)
            if (job.number, job.rung) not in open_jobs
        ]
        if not waiting_jobs:
            return "" if open_jobs else None
        job = self._open_jobs[name] = waiting_jobs[0]
        trial_dir = (
            self._folder / "trials" / str(job.number) / f"{self._folder.name}-{job.number}-{job.rung + 1}"
        )
        share = self._ledger.search["rungs"][job.rung]
        return json.dumps({"values": job.values, "share": share, "folder": str(trial_dir)})

    def end_job(self, name: str, answer: dict[str, Any] | None) -> None:
        """Record the answer of `run_trial` to an open job; None means that the job's process died."""
        job = self._open_jobs.pop(name)
        if answer is None or answer["broken"]:
            self.broken = answer["broken"] if answer else f"the process of trial {job.number} died"
            return
        result = TrialResult(
            job.number, job.rung, job.values, answer["score"], answer["failed"], answer["minutes"]
        )
        self._ledger.add(result)
        sizes = self._halving.compute_sizes()
        self._say(format_progress(result, self._ledger.search, len(self._ledger.results), sum(sizes)))


def _make_searcher(jobs: _JobQueue) -> Any:
    """Return a search algorithm of Ray Tune whose configurations are the jobs of a queue."""
    from ray.tune.search import Searcher

    class JobSearcher(Searcher):
        def suggest(self, trial_id: str) -> Any:
            job = jobs.get_next(trial_id)
            if job is None:
                return Searcher.FINISHED
            return {"job": job} if job else None  # None makes Tune ask again later

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            jobs.end_job(trial_id, None if error or not result or "score" not in result else result)

        def save(self, checkpoint_path: str) -> None:
            """Save nothing, because the ledger has all results."""

        def restore(self, checkpoint_path: str) -> None:
            """Restore nothing, because the ledger has all results."""

    return JobSearcher()


def _finish_search(
    subject: TunedScenario, space: SearchSpace, halving: SuccessiveHalving, ledger: SearchLedger, folder: Path
) -> dict[str, Any]:
    """Write the best result, its scenario and the picture; return the result of `tune_scenario`.

    Raises:
        ConfigError: All trials failed.
    """
    best = halving.find_winner(ledger.results)
    if best is None:
        reason = ledger.results[0].failed
        raise ConfigError(
            f"all {len(ledger.results)} trials failed, the first one: {reason}. See {ledger.path}"
        )
    ledger.best = asdict(best)
    ledger.write()
    write_whole(folder / "best.yaml", subject.to_yaml(best.values).encode())
    write_whole(folder / "tune.svg", draw_search(space, ledger.results, ledger.search).encode())
    return {
        "search": ledger.search,
        "results": [asdict(result) for result in ledger.results],
        "best": ledger.best,
        "folder": str(folder),
        "scenario": str(folder / "best.yaml"),
        "picture": str(folder / "tune.svg"),
    }
