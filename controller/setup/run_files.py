"""What a scenario names beside itself: its tables for the tokenise stage, and its own files, copied into the run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder
from nonet.controller.scenario import LIBRARY, Scenario, bound, document, load_scenario, yaml
from nonet.controller.setup.own_files import keep_copies
from nonet.controller.setup.worker_setup import stored_sequences, targets
from nonet.errors import ConfigError
from nonet.samples.sequences import MASK, LabelSetup
from nonet.workers.roles import DataSetup, KnownRun


def data_setup(scenario: Scenario, folder: Path, known: KnownRun | None = None) -> DataSetup:
    """What the tokenise stage is told; `known`: of the run that weights start from."""
    data = scenario.data
    return DataSetup(
        interactions=_beside(scenario, folder, "interactions", data.interactions),
        items=_beside(scenario, folder, "items", data.items) if data.items else None,
        columns=dict(data.columns),
        keep=data.keep.model_dump(),
        where=data.where,
        split={"use": data.split.use, **data.split.options()},
        targets=targets(scenario),
        tokenizer={"use": scenario.tokenizer.use, **scenario.tokenizer.options()},
        folder=str(folder),
        seed=scenario.seed,
        known=known,
        repeats=data.repeats if scenario.model.spec.makes_lists else MASK,
        transitions=scenario.model.counts(),
        prepare=data.prepare,
        stored=stored_sequences(scenario),
        compress=(data.events.compress, data.events.by) if data.events else None,
        labels=_labels(scenario, folder),
        missing=data.table_format.missing,
    )


def _labels(scenario: Scenario, folder: Path) -> LabelSetup | None:
    """Labels that come later; events that have none yet are history for models of lists, and left out for click models."""
    labels = scenario.data.labels
    if labels is None:
        return None
    path = _beside(scenario, folder, "labels.path", labels.path)
    return LabelSetup(path, labels.within, labels.name, not scenario.model.spec.makes_lists)


def _beside(scenario: Scenario, folder: Path, key: str, path: str) -> str:
    """A relative path of the scenario, resolved beside it; builtin names, URIs and absolute paths as they are.

    Raises ConfigError for a shipped scenario that comes without data of its own.
    """
    if ":" in path or Path(path).is_absolute():
        return path
    if folder.resolve() == LIBRARY.resolve():
        raise ConfigError(
            f"data.{key}: {path} lies beside the scenario, and {scenario.name} is shipped without data. `nonet new "
            f"{scenario.name} DIR` puts it beside the tables that `nonet import` wrote to DIR; or give a whole path: "
            f'--set data.{key}="$PWD/DIR/{path}"'
        )
    return str(folder / path)


def write_run(scenario: Scenario, folder: Path, run: RunFolder) -> str:
    """Put the scenario and its own files into the run's folder, or find them there; the hash of what is there.

    Raises ConfigError where the folder is that of another scenario, or a file is missing.
    """
    make_folder(run.path)
    if run.scenario.exists():
        check_same(scenario, run)
    if not run.sources_list.exists():
        keep_copies(scenario, folder, run)
    if not run.scenario.exists():
        write_whole(run.scenario, yaml.dump(document(scenario)).encode())
    return hashlib.sha256(run.scenario.read_bytes()).hexdigest()


def check_same(scenario: Scenario, run: RunFolder) -> None:
    """Raise ConfigError where a run's folder is that of another scenario, deadlines and values of env.vars left aside."""
    if bound(document(load_scenario(run.scenario)[0])) != bound(document(scenario)):
        raise ConfigError(
            f"{run.path} is a run of another scenario ({run.scenario}); "
            "choose another --run-dir, or resume it with `nonet resume`"
        )
