"""Plans that change: groups that a stage's own roles, or a node that came or went, stop and start. Nothing moves needlessly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nonet.controller.cluster import ClusterView
from nonet.controller.draft import Draft, drafts
from nonet.controller.fit import Capacity
from nonet.controller.groups import GroupPlan, place_groups, with_threads
from nonet.controller.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Change:
    """Groups that a stage of its own roles stops, and those it starts, before it begins; then torch threads a worker."""

    stage: str
    stops: tuple[str, ...]
    starts: tuple[GroupPlan, ...]
    threads: int = 0

    def after(self, before: Iterable[GroupPlan]) -> tuple[GroupPlan, ...]:
        """The groups that there are once this is done, those that stay with the threads they then have."""
        kept = (group for group in before if group.name not in self.stops)
        return (*(replace(g, threads=self.threads if g.threads else 0) for g in kept), *self.starts)


def replan(scenario: Scenario, view: ClusterView, stage: str | None, before: Iterable[GroupPlan]) -> Change:
    """What must stop and start so that the groups `before` become those of `stage` on the view: nothing moves needlessly.

    A group stays when its draft is the same and its nodes are still there; `view` says what is free beside them.
    """
    return _change(scenario, stage, tuple(before), Capacity(view), view, 0)[0]


def make_changes(
    scenario: Scenario, groups: tuple[GroupPlan, ...], capacity: Capacity, view: ClusterView, threads: int
) -> tuple[tuple[Change, ...], dict[str, tuple[GroupPlan, ...]]]:
    """Re-plans before the stages that name roles of their own, and back after them; and the groups of every stage."""
    found, by_stage, now, own = [], {}, groups, False
    for stage, body in scenario.stages.items():
        if body.roles or own:
            change, now = _change(scenario, stage, now, capacity, view, threads)
            if change.stops or change.starts:
                found.append(change)
        by_stage[stage], own = now, bool(body.roles)
    return tuple(found), by_stage


def _change(
    scenario: Scenario,
    stage: str | None,
    now: tuple[GroupPlan, ...],
    capacity: Capacity,
    view: ClusterView,
    threads: int,
) -> tuple[Change, tuple[GroupPlan, ...]]:
    wanted = drafts(scenario, stage)
    by_name = {draft.name: draft for draft in wanted}
    alive = {node.id for node in view.nodes}
    kept = tuple(g for g in now if _stays(g, by_name.get(g.name), alive))
    kept = tuple(g for g in kept if not g.shares or g.shares in {k.name for k in kept})
    stops = tuple(g for g in now if g not in kept)
    for group in stops:
        for node in (n for n in group.nodes if n in alive):
            for resource, amount in group.bundle.items():
                capacity.take(node, resource, -amount)
    after = with_threads(place_groups(wanted, capacity, view, kept), view, threads)
    names = {group.name for group in kept}
    starts = tuple(group for group in after if group.name not in names)
    counts = max((group.threads for group in after), default=0)
    return Change(stage or "", tuple(group.name for group in stops), starts, counts), after


def _stays(group: GroupPlan, draft: Draft | None, alive: set[str]) -> bool:
    return (
        draft is not None
        and (draft.roles, draft.pool, draft.shares) == (group.roles, group.pool, group.shares)
        and draft.least <= group.workers <= draft.most
        and draft.asks == (group.cpus or group.devices)
        and (bool(group.shares) or group.bundle.get(draft.resource) == draft.bundle)
        and set(group.nodes) <= alive
    )
