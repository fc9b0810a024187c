"""The notes that a run shows when its session has opened: what its data are, and what is validated and ranked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.scenario import Scenario
from nonet.controller.scenario.settings import describe_duplicates, describe_repeats, describe_shared_codes
from nonet.controller.session.session import Session


def make_start_notes(session: Session) -> Iterator[str]:
    """Yield notes on the data, the semantic ids, and what is validated and ranked."""
    scenario, facts = session.scenario, session.facts
    data, tokens = facts["data"], facts["tokenizer"]
    if data["notice"]:
        yield data["notice"]
    held_out = ", ".join(f"{data['held_out'][name]} {name}" for name in ("rl", "valid", "test"))
    yield f"{data['users']} users, {data['items']} items, {data['events']} events; held out: {held_out}"
    yield from _make_data_notes(facts)
    yield from _make_validation_notes(scenario, facts, validates=hasattr(session.evaluator, "validate"))
    yield from make_evaluation_notes(scenario, data)
    yield from session.groups.notes
    if repeats := describe_repeats(data):
        yield repeats
    if tokens:
        yield f"semantic ids: codes used {tokens.get('used')} of {tokens.get('codes')}"
    for text in (describe_duplicates(data), describe_shared_codes(tokens or {}, data["items"])):
        if text:
            yield f"warning: {text}"
    if session.restored:
        yield f"resumed from step {session.restored.stage_step} of {session.restored.stage}"


def _make_validation_notes(scenario: Scenario, facts: Mapping[str, Any], *, validates: bool) -> Iterator[str]:
    """Yield a note if stages that could be validated are not, and why."""
    stages = [name for name, body in scenario.stages.items() if body.kind.validates]
    held_out = facts["data"]["held_out"]["valid"]
    if stages and not (held_out and validates):
        reason = "this evaluator has no validate" if held_out else "no validation events (data.split.valid)"
        yield f"{reason}: {', '.join(stages)} run all their steps and end with their last checkpoint"


def make_evaluation_notes(scenario: Scenario, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes if not all users are ranked, or if models are ranked by beam alone."""
    options, tested = scenario.evaluate, data["users"] - data.get("users_only_trained", 0)
    if not scenario.model.spec.makes_lists:
        return
    if options.most_users is not None and tested > options.most_users:
        yield f"{options.most_users:,} of {tested:,} tested users are ranked, drawn by the seed (evaluate.users)"
    if not options.is_exhaustive(data["items"]):
        yield (
            f"models are ranked by beam alone among {data['items']:,} items (evaluate.exhaustive): what a beam does not hold is "
            "missed, so their metrics are lower bounds"
        )


def _make_data_notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on columns that were dropped and on what a warm start knows."""
    if dropped := facts["data"].get("dropped"):
        yield f"not read, for they hold neither numbers nor text: {', '.join(dropped)}"
    if start := facts.get("init"):
        yield (
            f"starts from {start['run']} after {start['stage']}: {start['known_users']} of {start['users']} users and "
            f"{start['known_items']} of {start['items']} items are known"
        )
