"""The verbs that the runs of a scenario have, as the kinds of its parts declare them."""

from __future__ import annotations

from collections.abc import Iterator

from nonet.controller.scenario.scenario import Scenario
from nonet.errors import ConfigError
from nonet.verbs import VERBS, SupportedVerbs


def check_supported(scenario: Scenario, verb: str, run_name: str) -> None:
    """Check that a verb works for the runs of a scenario, as the kinds of its parts declare it.

    Args:
        scenario: The scenario, or that of a run.
        verb: One of `nonet.verbs.VERBS`.
        run_name: The name of the scenario or run, for the error.

    Raises:
        ConfigError: The verb does not work; the message has the reason and the next step.
    """
    if limit := find_verb_limit(scenario, verb):
        raise ConfigError(f"{verb}: {run_name} {limit}")


def find_verb_limit(scenario: Scenario, verb: str) -> str | None:
    """Return why a verb does not work for the runs of a scenario, as what follows the name of the run; None if it works.

    Args:
        scenario: The scenario.
        verb: One of `nonet.verbs.VERBS`.
    """
    for part, supported in _list_declarations(scenario):
        if limit := supported.find_limit(verb):
            return f"{part}, which {limit}"
    stage_limits = {name: stage.kind.verbs.find_limit(verb) for name, stage in scenario.stages.items()}
    if not stage_limits or not all(
        stage_limits.values()
    ):  # one stage that has a part in the verb is sufficient
        return None
    name, limit = stage_limits.popitem()
    return f"has stages.{name}, which {limit}"


def list_missing_verbs(scenario: Scenario) -> dict[str, list[str]]:
    """Return the verbs that the runs of a scenario do not have because of a part other than their stages, by reason."""
    missing: dict[str, list[str]] = {}
    for part, supported in _list_declarations(scenario):
        for verb in VERBS:
            if limit := supported.find_limit(verb):
                missing.setdefault(f"{part}, which {limit}", []).append(verb)
    return missing


def _list_declarations(scenario: Scenario) -> Iterator[tuple[str, SupportedVerbs]]:
    """Yield the parts of a scenario, as what follows the name of a run, with the verbs that they support."""
    trainer = scenario.roles.get("trainer")
    parts = {"model": scenario.model, "data.source": scenario.data.source, "tokenizer": scenario.tokenizer}
    for key, part in (parts | {"roles.trainer.engine": trainer and trainer.engine}).items():
        if part is not None:
            yield f"has {key}.use: {part.use}", part.spec.verbs
