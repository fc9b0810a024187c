"""Seconds of the parts of a step that groups share: cores that are contended, rows and gradients between processes, publishing.

Each is a count from the plan times a measure of `nonet doctor --calibrate`; none is fitted to a scenario.

What a run's data is like: the numbers its speed depends on, and the words for its repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nonet.controller.plan import GroupPlan, Plan, feature_dims
from nonet.controller.predict.calibration import Calibration
from nonet.controller.scenario import Scenario
from nonet.controller.scenario.settings import MANY_DUPLICATES
from nonet.samples.sequences import ALLOW

_DISTINCT = 0.7  # distinct keys over events of a batch
_LEAST_SHARING, _MANY_SHARING = (
    10,
    0.1,
)  # items with the same codes, and their share of all, from which it is told
_TOTALS = 2  # all-reduces of a few numbers a step: loss and count; the advantages' moments
_LARGEST = {2: 0.56, 3: 0.85, 4: 1.03}  # expected largest of so many normal draws, in deviations


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the plan's groups pay beside their arithmetic, on nodes that cost what the calibration says."""

    scenario: Scenario
    plan: Plan
    facts: DataFacts
    cost: Calibration
    parameters: int

    def slowdown(self, group: GroupPlan, kind: str) -> float:
        """How much longer compute takes than one thread on a core of its own: neighbours of the group, and its own threads."""
        fullest, threads = max(group.on_nodes().values()), max(1, group.threads)
        crowd = self.cost.slowdown(kind, fullest, fullest * threads, self.cores(group))
        return crowd / self.cost.speed(kind, threads)

    def both(self, rollout: GroupPlan, trainer: GroupPlan) -> float:
        """How much longer a rollout and an update take at once than each alone, on the node where they meet most."""
        slower = 1.0
        for node, here in rollout.on_nodes().items():
            there, cores = trainer.on_nodes()[node], max(1.0, self.plan.cores[node])
            mine, its = here * max(1, rollout.threads), there * max(1, trainer.threads)
            if there:
                together = here + there, mine + its, cores
                slower = max(
                    slower,
                    self.cost.slowdown("decode", *together) / self.cost.slowdown("decode", here, mine, cores),
                    self.cost.slowdown("update", *together) / self.cost.slowdown("update", there, its, cores),
                )
        return slower

    def cores(self, group: GroupPlan) -> float:
        return max(1.0, self.plan.cores[group.nodes[0]])

    def widest(self, users: float, workers: int) -> float:
        """The largest rank's share over the mean: expected largest of `workers` sums of users of unequal length."""
        if workers == 1:
            return 1.0
        deviation = self.facts.spread / max(1.0, users / workers) ** 0.5
        return 1 + deviation * _LARGEST.get(workers, 1.2)

    def sparse(self, events: float, users: float) -> dict[str, float]:
        """A training step's pulls and pushes of a rank: in process, and by all-to-all where rows are on several ranks."""
        cost, distinct, tables = self.cost, events * _DISTINCT, self._tables()
        if not tables:
            return {}
        local = cost.pull.seconds(distinct) + cost.push.seconds(distinct)
        local += (tables - 1) * (cost.pull.seconds(users) + cost.push.seconds(users))
        if self.alone():
            return {"lookup": local}
        wire = cost.exchange.seconds(distinct) + (tables - 1) * cost.exchange.seconds(users)
        return {"lookup": local, "exchange": wire * self._queue()}

    def read(self, events: float, users: float) -> dict[str, float]:
        """An RL step's pulls of a rank; its rows are frozen, so nothing is pushed."""
        cost, distinct, tables = self.cost, events * _DISTINCT, self._tables()
        if not tables:
            return {}
        local = cost.pull.seconds(events) + (tables - 1) * cost.pull.seconds(users)
        if self.alone():
            return {"lookup": local}
        wire = cost.exchange.seconds(distinct) + (tables - 1) * cost.exchange.seconds(users)
        return {"lookup": local, "exchange": wire / 2 * self._queue()}

    def reduce(self) -> float:
        """All-reduce of the dense gradients, and of a few totals before it."""
        if self.trainer.workers == 1:
            return 0.0
        return self.cost.reduce.seconds(4 * self.parameters) + _TOTALS * self.cost.reduce.seconds()

    def publish(self) -> float:
        """Fused on one rank nothing moves; else rows go to a replica in every rollout, and weights to another process."""
        rollout = self.plan.group_of("rollout")
        fused = rollout.name == self.trainer.name
        if fused and self.alone():
            return self.cost.call.seconds()
        dense = 0.0 if fused else self.cost.weights.seconds(4.0 * self.parameters)
        others = (rollout.workers - 1) * self.cost.call.seconds()
        return dense + self.cost.publish.seconds(self.rows_published()) + others

    def rows_published(self) -> float:
        """Rows of all tables: each user one, each item one where items are a feature."""
        if not self._tables():
            return 0.0
        return self.facts.users + (self._tables() > 1) * self.facts.items

    def moved(self, events: float) -> float:
        """Bytes between processes in a training step: keys and rows both ways, and the dense gradients."""
        if self.alone():
            return 0.0
        dims = sum(feature_dims(self.scenario).values())
        workers = self.trainer.workers
        return workers * events * _DISTINCT * (16 + 8 * dims) + 8 * self.parameters * (workers - 1)

    @property
    def trainer(self) -> GroupPlan:
        return self.plan.group_of("trainer")

    @property
    def shards(self) -> GroupPlan:
        return self.plan.group_of("embedding")

    def alone(self) -> bool:
        """Whether one trainer holds all rows itself."""
        return self.trainer.workers == 1 and self.shards.name == self.trainer.name

    def _tables(self) -> int:
        return len(feature_dims(self.scenario))

    def _queue(self) -> float:
        """Ranks of the sparse world over cores, at least 1: each handles what the others ask."""
        apart = self.shards.workers if self.shards.name != self.trainer.name else 0
        return max(1.0, (self.trainer.workers + apart) / self.cores(self.trainer))


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the sequences hold.

    spread     standard deviation over mean of the training events of a user
    targeted   share of the training events that a stage's `target:` keeps, by stage
    items, asked   of the catalogue; held-out prompts that every evaluation ranks
    """

    users: int
    trained_events: int
    spread: float = 1.5
    targeted: Mapping[str, float] = field(default_factory=dict)
    items: int = 0
    asked: int = 0


def repeats_text(data: Mapping[str, Any]) -> str:
    """A sentence on what holds of seen items in this run, and how many events it touches; "" where the data do not say.

    `data`: a report's or the tokenise stage's, whose "repeats" is {"policy", "chosen_by", "share"}.
    """
    repeats = data.get("repeats")
    if not repeats:
        return ""
    by = "chosen by the data" if repeats["chosen_by"] == "data" else "set by the scenario"
    how = f"data.repeats: {repeats['policy']}, {by}"
    test, train = (repeats["share"].get(name, 0.0) for name in ("test", "train"))
    if repeats["policy"] == ALLOW:
        return (
            f"Seen items may be recommended again ({how}): {percent(test)} of the test events return to one, "
            f"{percent(train)} of the training events."
        )
    missed = (
        f"{percent(test)} of the test events return to one and are missed by everybody"
        if test
        else "no test event returns to one"
    )
    return f"Seen items are recommended to nobody again ({how}); {missed}."


def duplicates_text(data: Mapping[str, Any]) -> str:
    """Return a sentence on the copies among a run's events; "" where there are few, or the data do not say.

    Args:
        data: of a report or the tokenise stage; "duplicates" are events of the same user, item and second as another.
    """
    copies, events = data.get("duplicates", 0), data.get("events", 0)
    if copies <= MANY_DUPLICATES * events:
        return ""
    return (
        f"{copies:,} of {events:,} events are there twice (same user, item and second), so a held-out event may be a copy of "
        "one that was trained on: drop the copies before you compare these numbers with others, unless they are events of "
        "their own."
    )


def shared_codes_text(tokenizer: Mapping[str, Any], items: int) -> str:
    """Return a sentence on the largest group of items with the same codes; "" where it is small, or nothing is known of it.

    Args:
        tokenizer: the report of semantic ids; "largest_collision" is the size of that group.
        items: the size of the catalogue.
    """
    largest = tokenizer.get("largest_collision", 0)
    if largest < max(_LEAST_SHARING, _MANY_SHARING * items):
        return ""
    return (
        f"{largest:,} of {items:,} items ({percent(largest / items)}) share the same codes and differ in the collision level "
        "alone, which says nothing about them: name tokenizer.vectors that tell these items apart, or raise tokenizer.levels "
        "or tokenizer.codes."
    )


def percent(share: float) -> str:
    """A share in per cent, never 0 where there is some."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"
