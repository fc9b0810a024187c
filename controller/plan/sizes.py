"""How large a model and its tables are, from the scenario alone. Pure: no torch; a model's own spec knows its shape."""

from __future__ import annotations

from nonet.controller.scenario import Scenario, table_arguments
from nonet.embedding.tables import TableSpec
from nonet.models import ModelSize, Surroundings


def model_size(scenario: Scenario) -> ModelSize:
    """The shape of the scenario's model."""
    tokens = scenario.tokenizer.options()
    around = Surroundings(
        int(tokens.get("levels", 3)),
        int(tokens.get("codes", 64)),
        scenario.data.history,
        feature_dims(scenario),
    )
    return scenario.model.spec.size(scenario.model.options(), around)


def feature_dims(scenario: Scenario) -> dict[str, int]:
    """Width of each sparse feature."""
    defaults = scenario.sparse.defaults
    return {
        feature: table.dim or defaults.dim
        for name, table in scenario.sparse.tables.items()
        for feature in table.features or [name]
    }


def table_bytes(scenario: Scenario) -> dict[str, int | None]:
    """Bytes of each table over all shards: its budget, or None where only the data will tell."""
    return {name: table.budget for name, table in scenario.sparse.tables.items()}


def hot_row_bytes(scenario: Scenario) -> int:
    """Bytes of hot rows on each shard's device, as the tables' tiers say."""
    return sum(_of_tier(scenario, name, "device") for name in scenario.sparse.tables)


def shard_bytes(scenario: Scenario, shards: int) -> float:
    """Bytes of rows in each shard's memory: what a tier holds there, else the shard's part of the budget, where one is given."""
    budgets = table_bytes(scenario)
    parts = [(_of_tier(scenario, name, "host"), (budget or 0) / shards) for name, budget in budgets.items()]
    return sum(min(tier, part) if tier and part else tier or part for tier, part in parts)


def _of_tier(scenario: Scenario, name: str, tier: str) -> int:
    table, defaults = scenario.sparse.tables[name], scenario.sparse.defaults
    rows, tier_bytes = (table.tiers and getattr(table.tiers, key) for key in (f"{tier}_rows", tier))
    return int(tier_bytes or (rows or 0) * TableSpec(**table_arguments(defaults, table)).row_bytes)
