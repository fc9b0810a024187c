"""What a verb that only reads a run needs to know of its kinds, stored in the run, so that it imports no code of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt, ValidationError

from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, find_verb_limit, load_scenario
from nonet.controller.setup.worker_setup import get_targets
from nonet.errors import ConfigError
from nonet.models import MODELS
from nonet.options import StrictModel, describe_invalid
from nonet.run_code import is_code_reference
from nonet.verbs import VERBS

_KEY = "reading"  # in the facts of a run


class ReadingFacts(StrictModel):
    """What the kinds of a run say about reading its results.

    Attributes:
        results: Dotted path of the class that reads what was predicted for the test events (`ModelSpec.results`).
        stages: Names of the stages.
        metrics: Names of the metrics.
        lower_is_better: Those for which lower values are better.
        target: The stage whose target labels events; None if there is none.
        most_users: The number of users that were tested at most; None for all.
        seed: The seed of the run.
        limits: For verbs that the run does not have, why, as what follows the name of the run.
    """

    results: str
    stages: list[str]
    metrics: list[str]
    lower_is_better: list[str]
    target: str | None
    most_users: PositiveInt | None
    seed: int
    limits: dict[str, str]

    @property
    def own_metrics(self) -> list[str]:
        """Those of the metrics that code of the run computes."""
        return list(filter(is_code_reference, self.metrics))

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> ReadingFacts:
        """Return what the kinds of a scenario say."""
        spec, metrics = scenario.model.spec, [str(metric) for metric in scenario.evaluate.metrics]
        limits = {verb: find_verb_limit(scenario, verb) for verb in VERBS}
        return cls(
            results=spec.results,
            stages=list(scenario.stages),
            metrics=metrics,
            lower_is_better=sorted(filter(spec.is_lower_better, metrics)),
            target=next(iter(get_targets(scenario)), None),
            most_users=scenario.evaluate.most_users,
            seed=scenario.seed,
            limits={verb: limit for verb, limit in limits.items() if limit},
        )

    @classmethod
    def from_run(cls, run: RunFolder, facts: Mapping[str, Any]) -> ReadingFacts:
        """Return what was stored in a run, or what its scenario says if an earlier version wrote the run.

        Args:
            run: The run.
            facts: The facts about its data.

        Raises:
            ConfigError: Reading the results needs code that is not installed, or the facts are damaged.
        """
        if _KEY not in facts:
            return cls.from_scenario(load_scenario(run.scenario)[0])
        try:
            stored = cls.model_validate(facts[_KEY])
        except ValidationError as error:
            raise ConfigError(
                f"{run.id}: results/tokenise.json, {_KEY}.{describe_invalid(error)}; copy the run again"
            ) from None
        if stored.results not in {MODELS.get(name).results for name in MODELS.list_names()}:
            raise ConfigError(
                f"{run.id}: its model reads results by code of its own ({stored.results}), which this command does not run"
            )
        return stored

    def store(self, run: RunFolder, facts: dict[str, Any]) -> None:
        """Add this to the facts about the data of a run, and write them, unless they have it, as those of a resumed run may."""
        content = self.model_dump()
        if facts.get(_KEY) != content:
            facts[_KEY] = content
            run.write_facts(facts)
