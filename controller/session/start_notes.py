"""The notes that a run shows after its session has opened: facts about its data, its validation and its evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.scenario import Scenario
from nonet.controller.scenario.settings import (
    describe_duplicates,
    describe_lost_labels,
    describe_repeats,
    describe_shared_codes,
    describe_unknown_items,
    has_many_lost_labels,
)
from nonet.controller.session.session import Session

_NO_COLD_EVENTS = ", so that the fit gives them next to no votes: hold such items out (data.split.cold_items), or split by time"


def make_start_notes(session: Session) -> Iterator[str]:
    """Yield notes on the data, the semantic ids, the validation and the evaluation, one sentence each."""
    scenario, facts = session.scenario, session.facts
    data, tokenizer = facts["data"], facts["tokenizer"]
    if data["notice"]:
        yield data["notice"]
    held_out = ", ".join(f"{data['held_out'][name]} {name}" for name in ("rl", "valid", "test"))
    yield f"{data['users']} users, {data['items']} items, {data['events']} events; held out: {held_out}"
    if unknown := describe_unknown_items(data):
        yield unknown
    if labels := describe_lost_labels(data):
        yield f"warning: {labels}" if has_many_lost_labels(data) else labels
    yield from _make_data_notes(facts)
    yield from _make_validation_notes(scenario, facts, validates=hasattr(session.evaluator, "validate"))
    yield from scenario.model.spec.list_data_notes(scenario, data)
    yield from make_evaluation_notes(scenario, data)
    yield from session.groups.notes
    if repeats := describe_repeats(data):
        yield repeats
    if votes := data.get("votes"):
        share = votes.get("cooccurrence")
        of_share = "" if share is None else f", and co-occurring items have {share:g} of the votes"
        is_chosen = data["held_out"]["valid"] > 0
        origin = "chosen on validation" if is_chosen else "there are no validation events to choose by"
        yield f"memory: the k-th newest event votes with k^-{votes['decay']:g}{of_share}; {origin}"
    if cold := data.get("cold"):
        yield (
            f"memory: {cold['items']} items have no training event; {cold['valid']} validation and {cold['test']} test events "
            "are of such items" + ("" if cold["valid"] else _NO_COLD_EVENTS)
        )
    if tokenizer:
        yield f"semantic ids: codes used {tokenizer.get('used')} of {tokenizer.get('codes')}"
    for text in (describe_duplicates(data), describe_shared_codes(tokenizer or {}, data["items"])):
        if text:
            yield f"warning: {text}"
    if session.restored:
        yield f"resumed from step {session.restored.stage_step} of {session.restored.stage}"


def _make_validation_notes(scenario: Scenario, facts: Mapping[str, Any], *, validates: bool) -> Iterator[str]:
    """Yield a note with the reason if stages of a kind that is validated run without validation."""
    stage_names = [name for name, body in scenario.stages.items() if body.kind.validates]
    valid_events = facts["data"]["held_out"]["valid"]
    if stage_names and not (valid_events and validates):
        reason = (
            "this evaluator has no validate" if valid_events else "no validation events (data.split.valid)"
        )
        yield f"{reason}: {', '.join(stage_names)} run all their steps and end with their last checkpoint"


def make_evaluation_notes(scenario: Scenario, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if only a sample of the users is ranked, and one if models are ranked by beam search alone.

    Args:
        scenario: The scenario.
        data: The facts about the data.
    """
    options, tested_users = scenario.evaluate, data["users"] - data.get("users_only_trained", 0)
    if not scenario.model.spec.makes_lists:
        return
    if options.most_users is not None and tested_users > options.most_users:
        yield f"{options.most_users:,} of {tested_users:,} tested users are ranked, drawn by the seed (evaluate.users)"
    if not options.is_exhaustive(data["items"]):
        yield (
            f"models are ranked by beam alone among {data['items']:,} items (evaluate.exhaustive): what a beam does not hold is "
            "missed, so their metrics are lower bounds"
        )


def _make_data_notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on columns that were dropped, on graphs, and on the users and items that a warm start knows."""
    if dropped_columns := facts["data"].get("dropped"):
        yield f"not read, for they hold neither numbers nor text: {', '.join(dropped_columns)}"
    if graphs := facts["data"].get("graphs"):
        yield f"graphs: {', '.join(f'{name} {edges:,} edges' for name, edges in graphs.items())}"
    if init := facts.get("init"):
        yield (
            f"starts from {init['run']} after {init['stage']}: {init['known_users']} of {init['users']} users and "
            f"{init['known_items']} of {init['items']} items are known"
        )
    if new := facts["data"].get("new"):
        optimizer = (
            "continues"
            if init and init.get("keeps_optimizer")
            else "begins anew, because the stages differ in it"
        )
        yield (
            f"trains on {new['new']:,} new events and {new['replayed']:,} older ones of {new['users']:,} users; the dense "
            f"optimizer {optimizer}"
        )
