"""What follows from the global sizes: a stage's groups, what it takes and gives, steps, and sizes a worker and chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.ledger import Ledger
from nonet.controller.options import Reinforced, Supervised
from nonet.controller.scenario import Scenario


def make_stages(
    scenario: Scenario, by_stage: Mapping[str, tuple[Any, ...]], ledger: Ledger
) -> Iterator[dict[str, Any]]:
    """Arguments of a StagePlan for every stage, from tokenise to evaluate."""
    now = next(iter(by_stage.values()))
    yield _stage("tokenise", "data", _on(now, "tokenise"), ("interactions", "items"), _TOKENISED)
    model: tuple[str, ...] = ()
    for name, body in scenario.stages.items():
        now = by_stage[name]
        trainer = next(group for group in now if "trainer" in group.roles)
        chunks = ledger.chunks.get(name, {})
        chunk = chunks.get(f"{trainer.name}.trainer", 0)
        if isinstance(body, Supervised):
            on, takes = _on(now, "trainer", "embedding"), ("sequences", "sids", *model)
            sizes = _supervised(body, trainer.workers, chunk)
            yield _stage(name, "supervised", on, takes, ("model:" + name,), sizes)
        else:
            rollout = next(group for group in now if "rollout" in group.roles)
            wave = chunks.get(f"{rollout.name}.rollout", 0)
            on = _on(now, "trainer", "rollout", "embedding", f"{name}.")
            sizes = _reinforced(body, trainer.workers, rollout.workers, chunk, wave)
            yield _stage(
                name,
                "rl",
                on,
                ("sequences", "catalogue", *(model or ("nothing",))),
                ("model:" + name,),
                sizes,
            )
        model = ("model:" + name,)
    yield _stage(
        "evaluate", "evaluate", _on(now, "evaluator"), ("sequences", "catalogue", "model"), ("metrics",)
    )


_TOKENISED = ("sequences", "items", "sids", "catalogue")


def _stage(
    name: str,
    kind: str,
    groups: tuple[str, ...],
    takes: tuple[str, ...],
    gives: tuple[str, ...],
    derived: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "groups": groups,
        "takes": takes,
        "gives": gives,
        "derived": derived or {},
    }


def _on(groups: tuple[Any, ...], *roles: str) -> tuple[str, ...]:
    """Groups that hold one of these roles; a name that ends in a dot stands for all that begin so."""
    prefixes = tuple(role for role in roles if role.endswith("."))
    return tuple(
        group.name
        for group in groups
        if any(role in roles or (prefixes and role.startswith(prefixes)) for role in group.roles)
    )


def _supervised(body: Supervised, workers: int, chunk: int) -> dict[str, Any]:
    batch = body.batch
    found: dict[str, Any] = {"epochs": body.epochs} if body.epochs else {"tokens": int(body.tokens or 0)}
    cut = {"tokens a chunk": chunk} if chunk else {}
    if batch.users:
        return found | {"users a step": batch.users, "users a trainer": -(-batch.users // workers)} | cut
    if body.tokens and batch.tokens:
        found["steps"] = -(-int(body.tokens) // int(batch.tokens))
    tokens = int(batch.tokens or 0)
    return found | {"tokens a step": tokens, "tokens a trainer": -(-tokens // workers)} | cut


def _reinforced(body: Reinforced, trainers: int, rollouts: int, chunk: int, wave: int) -> dict[str, Any]:
    options = body.rollout.options()
    width, staleness = options.get("width", 1), options.get("staleness", 0)
    found = {
        "steps": body.steps,
        "users a step": body.users,
        "beams a step": body.users * width,
        "users a rollout": -(-body.users // rollouts),
        "beams a trainer": -(-body.users // trainers) * width,
        "prompts a rollout's chunk": wave,
        "prompts a trainer's chunk": chunk,
    }
    return found | ({"steps that beams may be old (not run)": staleness} if staleness else {})
