"""What a scenario names beside itself: its tables for the tokenise stage, and its own files, copied into the run."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from nonet.controller import yaml
from nonet.controller.part import is_reference
from nonet.controller.run_folder import RunFolder
from nonet.controller.scenario import Scenario, bound, document
from nonet.controller.setups import reward_options, targets
from nonet.errors import ConfigError
from nonet.workers.tokenise import DataSetup


def data_setup(scenario: Scenario, folder: Path) -> DataSetup:
    """What the tokenise stage is told."""
    data = scenario.data
    return DataSetup(
        interactions=_beside(folder, data.interactions),
        items=_beside(folder, data.items) if data.items else None,
        columns=dict(data.columns),
        keep=data.keep.model_dump(),
        where=data.where,
        split={"use": data.split.use, **data.split.options()},
        targets=targets(scenario),
        tokenizer={"use": scenario.tokenizer.use, **scenario.tokenizer.options()},
        folder=str(folder),
        seed=scenario.seed,
    )


def copy_own_files(scenario: Scenario, source: Path, target: Path) -> None:
    """Copy every file.py that the scenario uses, keeping its relative place. Raises ConfigError for one that is missing."""
    for use in _own_files(scenario):
        origin = (source / use).resolve()
        if not origin.is_file():
            raise ConfigError(f"use: {use}: there is no file {origin}; it is looked for beside the scenario")
        outside = Path(use).is_absolute() or ".." in Path(use).parts
        place = target / (Path(use).name if outside else use)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, place)


def _own_files(scenario: Scenario) -> Iterator[str]:
    for _, _, options in reward_options(scenario):
        if isinstance(options.use, str) and is_reference(options.use) and ".py" in options.use:
            yield options.use.rsplit(":", 1)[0] if not options.use.endswith(".py") else options.use


def _beside(folder: Path, path: str) -> str:
    """A relative path of the scenario, resolved beside it; builtin names, URIs and absolute paths as they are."""
    return path if ":" in path or Path(path).is_absolute() else str(folder / path)


def write_run(scenario: Scenario, folder: Path, run: RunFolder) -> str:
    """Put the scenario and its own files into the run's folder, or find them there; the hash of what resuming must keep.

    Deadlines may be other ones than before. Raises ConfigError where the folder is that of another scenario.
    """
    whole = document(scenario)
    text, kept = yaml.dump(whole), bound(whole)
    if run.scenario.exists():
        if bound(yaml.read(run.scenario)) != kept:
            raise ConfigError(
                f"{run.path} is a run of another scenario ({run.scenario}); "
                "choose another --run-dir, or resume it with `nonet resume`"
            )
    else:
        run.path.mkdir(parents=True, exist_ok=True)
        run.sources.mkdir(exist_ok=True)
        copy_own_files(scenario, folder, run.sources)
    if not run.scenario.exists() or run.scenario.read_text(encoding="utf-8") != text:
        run.scenario.write_text(text, encoding="utf-8")
    return hashlib.sha256(kept.encode()).hexdigest()
