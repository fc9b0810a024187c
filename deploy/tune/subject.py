"""The scenario that is tuned: the scenario and the score of a trial, and the check of the whole search space.

A trial runs the stages up to the last supervised one, and its score is that stage's best validation. Later
stages, such as RL, and baselines do not affect it. Test events are not used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.controller.record import RunFolder, ValidationRecord
from nonet.controller.scenario import (
    Scenario,
    check_scenario,
    check_validation,
    load_scenario,
    make_scenario,
    make_validation_rule,
    put_value,
    read_document,
    to_document,
)
from nonet.controller.setup import (
    hash_tables,
    list_named_files,
    make_data_setup,
    preflight,
    resolve_paths,
    resolve_sources,
)
from nonet.deploy.run import ScenarioFile
from nonet.deploy.tune.space import METRIC, SearchSpace
from nonet.errors import ConfigError, DataError
from nonet.models import NATS
from nonet.plugins import PluginFiles, parse_file
from nonet.suggest import join_names, suggest_sentence

_LENGTH_KEYS = ("epochs", "steps", "tokens")  # of a stage; each stage has one of them
_METRIC_KEY = "checkpoint.keep.best"


@dataclass(frozen=True)
class TunedScenario:
    """The scenario that a search changes.

    Attributes:
        document: The scenario as plain data.
        folder: The folder that the scenario's files are relative to.
        source: The name of the scenario in errors.
    """

    document: dict[str, Any]
    folder: Path
    source: str

    @classmethod
    def read(
        cls, source: str | Path, changes: list[str] | None = None, metric: str | None = None
    ) -> TunedScenario:
        """Read the scenario of a path or of a shipped name.

        Values that `settings: data` derives from the data, and the run of `init`, are fixed here for all trials.

        Args:
            source: The scenario's file or name.
            changes: Changes of keys, each "a.b=c".
            metric: The metric to search by; None for the scenario's own.

        Raises:
            ConfigError: No stage is validated, or the metric is not measured.
        """
        scenario, folder = load_scenario(source, changes)
        if scenario.settings:  # with the derived values
            document = scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
        else:
            document = read_document(source, changes).document
        if (start := resolve_sources(scenario).init) is not None:
            document["init"] = start.model_dump(by_alias=True, exclude_none=True)
        if metric is not None:
            put_value(document, _METRIC_KEY, metric, METRIC)
            for stage in document["stages"].values():
                if yaml.is_map(stage) and yaml.is_map(stage.get("stop")) and stage["stop"].get("by"):
                    stage["stop"]["by"] = metric
        subject = cls(document, folder, str(source))
        try:
            check_validation(subject.build_scenario({}))
        except ConfigError as error:
            raise ConfigError(f"{METRIC}: {error}" if metric is not None else str(error)) from None
        if subject.stage is None:
            raise ConfigError(
                f"{source}: a search needs validation, and no stage of this scenario is validated; it needs a supervised stage "
                "and validation events (data.split.valid, such as valid: 1)"
            )
        return subject

    def build_scenario(self, values: Mapping[str, Any]) -> Scenario:
        """Return the whole scenario with values by key. Raises ConfigError if a value is not valid."""
        return make_scenario(self._apply_values(values), self.source, PluginFiles(str(self.folder)))

    def build_trial(self, values: Mapping[str, Any], share: Fraction = Fraction(1)) -> ScenarioFile:
        """Return the scenario of a trial: stages up to the judged one, each with a share of its length.

        Args:
            values: Values by key.
            share: The share of each stage's length.
        """
        document = self._apply_values(values)
        names = list(document["stages"])
        for name in names[names.index(self.judged) + 1 :]:
            del document["stages"][name]
        for stage in document["stages"].values():
            _shorten(stage, _LENGTH_KEYS, share)
        if evaluate := document.get("evaluate"):
            # Baselines do not affect the score; those that the model adds by default take no time.
            evaluate.pop("baselines", None)
            _shorten(evaluate, ("every",), share)
        return ScenarioFile(make_scenario(document, self.source, PluginFiles(str(self.folder))), self.folder)

    def list_lengths(self, share: Fraction) -> list[Any]:
        """Return the lengths of a trial's stages in a fixed order, to compare rungs with one another."""
        stages = self.build_trial({}, share).scenario.stages.values()
        return [getattr(stage, key, None) for stage in stages for key in _LENGTH_KEYS]

    @cached_property
    def stage(self) -> str | None:
        """The last supervised stage that is validated; None if there is none."""
        scenario = self.build_scenario({})
        stages = [name for name, stage in scenario.stages.items() if stage.kind.validates]
        return next((name for name in reversed(stages) if make_validation_rule(scenario, name)), None)

    @property
    def judged(self) -> str:
        """The name of the stage whose validation is the score: `stage`, which `read` has checked to exist."""
        assert self.stage is not None
        return self.stage

    @cached_property
    def rule(self) -> Any:
        """The validation rule of the judged stage: its metric, and whether lower is better."""
        return make_validation_rule(self.build_scenario({}), self.judged)

    def read_score(self, run: RunFolder) -> float | None:
        """Return the best validation of the judged stage; None if no validation gave a finite number."""
        history, metric = ValidationRecord(run, self.judged).history, self.rule.metric
        values = [entry[NATS] if metric == NATS else entry["metrics"][metric] for entry in history]
        values = [float("nan") if value is None else float(value) for value in values]
        best = self.rule.find_best(values)
        return values[best] if best is not None and math.isfinite(values[best]) else None

    def check(self, space: SearchSpace) -> list[str]:
        """Build and check a trial at every corner of the space, and check the files and the data with every listed value.

        Args:
            space: The search space.

        Returns:
            Warnings about the data.

        Raises:
            ConfigError: A key or a combination of values is wrong; the message has the values.
            DataError: The data cannot be used.
        """
        for key in space.keys:
            self._check_path(f"{space.source}: {key.path}", key.path)
        for values in space.iterate_corners():
            with _add_values_to_errors(space, values):
                trial = self.build_trial(values)
                check_scenario(trial.scenario)
        checks = preflight.FileChecks()
        for values in space.iterate_listed():
            with _add_values_to_errors(space, values):
                preflight.check(self.build_trial(values).scenario, self.folder, checks)
        return list(dict.fromkeys(checks.warnings))

    def as_json(self) -> dict[str, Any]:
        """Return the scenario's document without values of env.vars, and hashes of its Python files and of its tables.

        The ledger of a search compares them, so that a search continues only with the same scenario and data.
        """
        scenario = self.build_scenario({})
        paths = {use: (self.folder / use).resolve() for use in list_named_files(scenario)}
        hashes = {
            use: hashlib.sha256(path.read_bytes()).hexdigest()
            for use, path in paths.items()
            if path.is_file()
        }
        tables = hash_tables(make_data_setup(scenario, self.folder))
        return {"scenario": to_document(scenario), "files": hashes, "tables": tables}

    def to_yaml(self, values: Mapping[str, Any]) -> str:
        """Return the whole scenario with these values as YAML, with absolute paths so that it loads from any folder."""
        scenario = self.build_scenario(values)
        document = to_document(scenario)
        resolve_paths(self.folder, scenario, document)
        named_files = list_named_files(scenario)
        return yaml.dump(_make_references_absolute(document, PluginFiles(str(self.folder)), named_files))

    def _apply_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the document with values by key."""
        document = deepcopy(self.document)
        for path, value in values.items():
            put_value(document, path, deepcopy(value), path)
            reasons = document.get("settings")  # by key: why its value was derived from the data
            if isinstance(reasons, dict):  # a key that is set here is no longer derived
                document["settings"] = {
                    key: reason for key, reason in reasons.items() if not f"{path}.".startswith(f"{key}.")
                }
        return document

    def _check_path(self, where: str, path: str) -> None:
        """Check a key of the search space.

        Args:
            where: The file and the key, for errors.
            path: The key.

        Raises:
            ConfigError: The key is below a name that does not exist, or does not affect the score, or decides what it measures.
        """
        scenario = self.build_scenario({})
        if path.endswith(".target") and scenario.model.spec.has_tasks:
            raise ConfigError(
                f"{where}: scores of trials that predict different labels cannot be compared; set it for all trials with --set"
            )
        document = scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
        stages = list(document["stages"])
        # Maps whose keys are names that the scenario chooses; loading would accept any other name.
        for parent in ("stages", "sparse.tables", *(f"stages.{stage}.rewards" for stage in stages)):
            if path.startswith(f"{parent}."):
                names = _get_nested(document, parent)
                name = path.removeprefix(f"{parent}.").partition(".")[0]
                if name not in names:
                    raise ConfigError(
                        f"{where}: {parent} has no {name!r}; it has {join_names(names)}.{suggest_sentence(name, names)}"
                    )
        stage = path.split(".")[1] if path.startswith("stages.") else self.judged
        if stages.index(stage) > stages.index(self.judged):
            raise ConfigError(
                f"{where}: the score of a trial is the validation of stages.{self.judged}, and {stage} comes after it, so this "
                "key would not affect the score; remove it"
            )


@contextmanager
def _add_values_to_errors(space: SearchSpace, values: Mapping[str, Any]) -> Iterator[None]:
    """Add the values that a scenario is checked with to the messages of errors."""
    try:
        yield
    except (ConfigError, DataError) as error:
        values_text = ", ".join(f"{path}={value}" for path, value in values.items())
        raise type(error)(f"{space.source}: with {values_text}: {error}") from None


def _get_nested(document: Any, path: str) -> Mapping[str, Any]:
    """Return the part of a document at a path; {} if it is missing."""
    for part in path.split("."):
        document = (document or {}).get(part)
    return document or {}


def _shorten(part: Any, keys: Sequence[str], share: Fraction) -> None:
    """Multiply the values of some keys in a part of a document by a share, in place and rounded up.

    Values that are no numbers stay: loading the document reports them.
    """
    for key in keys if yaml.is_map(part) else ():
        value = part.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            part[key] = type(value)(math.ceil(Fraction(value) * share))


def _make_references_absolute(value: Any, files: PluginFiles, named_files: Collection[str]) -> Any:
    """Return a part of a document in which references to named files, such as `file.py:Name`, have absolute paths."""
    if isinstance(value, dict):
        return {key: _make_references_absolute(part, files, named_files) for key, part in value.items()}
    if isinstance(value, list):
        return [_make_references_absolute(part, files, named_files) for part in value]
    return files.make_absolute(value) if parse_file(value) in named_files else value
