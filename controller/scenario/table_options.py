"""Arguments of `TableSpec` from the options of a scenario's tables, and the conversion of a time to live into steps.

The time to live of rows is counted in steps, the only clock that a resume or another number of shards does not change:
epochs are shuffled, so a step has no event time of its own, and wall time differs between machines. `ttl: 30d` therefore
means the number of steps that train 30 days' worth of events, at the rate of the first supervised stage. The key
`ttl_steps` sets the number directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario.scenario import Scenario
from nonet.controller.scenario.sparse import RowOptions, Table, TableDefaults, TierOptions
from nonet.embedding.tables import TableSpec
from nonet.embedding.tiers import TierSettings
from nonet.errors import ConfigError
from nonet.samples.sequences import COUNT, KINDS, SPAN
from nonet.suggest import suggest_sentence


def make_table_arguments(defaults: TableDefaults, table: Table) -> dict[str, Any]:
    """Return the keyword arguments of `TableSpec` that the scenario states.

    A time to live in event time (`ttl`) is not among them; `compute_ttl_steps` converts it when the data are known.

    Args:
        defaults: The options of all tables.
        table: The options of the table.
    """
    optimizer = table.optimizer or defaults.optimizer
    arguments: dict[str, Any] = {
        "dim": table.dim or defaults.dim,
        "optimizer": getattr(optimizer, "address", optimizer),
        "lr": table.lr or defaults.lr,
    }
    inherited = {
        name: getattr(defaults, name) if getattr(table, name) is None else getattr(table, name)
        for name in RowOptions.model_fields
    }
    admit, evict = table.admit, table.evict
    own = {
        "default": table.default,
        "admit_count": admit and admit.count,
        "admit_probability": admit and admit.probability,
        "ttl_steps": evict and evict.ttl_steps,
        "evict": ((evict and evict.by) or "lru") if table.budget else None,
        "budget_bytes": table.budget,
    }
    return arguments | {name: value for name, value in (inherited | own).items() if value is not None}


def check_tables(scenario: Scenario) -> None:
    """Check that all tables and their tiers are valid, and that each feature is known to the model and belongs to one table.

    Raises:
        ConfigError: A table or a feature is wrong.
    """
    defaults = scenario.sparse.defaults
    table_by_feature: dict[str, str] = {}
    for name, table in scenario.sparse.tables.items():
        try:
            spec = TableSpec(**make_table_arguments(defaults, table))
        except ConfigError as error:
            raise ConfigError(f"sparse.tables.{name}: {error}") from None
        if table.tiers:
            try:
                TierSettings.from_settings(spec, make_tier_arguments(table.tiers)).check(spec)
            except ConfigError as error:
                raise ConfigError(f"sparse.tables.{name}.tiers: {error}") from None
        for feature in table.features or [name]:
            known_features = _list_known_features(scenario)
            if known_features is not None and feature not in known_features:
                raise ConfigError(
                    f"sparse.tables.{name}: {scenario.model.use} has no feature {feature!r}; there are "
                    f"{', '.join(known_features)}.{suggest_sentence(feature, known_features)} "
                    f"A table with another name needs features: [{known_features[0]}]"
                )
            if feature in table_by_feature:
                raise ConfigError(
                    f"sparse.tables.{name}: feature {feature!r} also belongs to table {table_by_feature[feature]!r}; "
                    "a feature has one table"
                )
            table_by_feature[feature] = name
    _check_nearest(scenario, table_by_feature)
    has_only_rl = all(stage.kind.rolls_out for stage in scenario.stages.values())
    ttl_tables = [name for name, table in scenario.sparse.tables.items() if table.evict and table.evict.ttl]
    if ttl_tables and has_only_rl:
        raise ConfigError(
            f"sparse.tables.{ttl_tables[0]}.evict.ttl is counted in steps of the first supervised stage, and there is none: "
            "give ttl_steps, or leave it out"
        )


def _list_known_features(scenario: Scenario) -> tuple[str, ...] | None:
    """Return the features that the model can read, including joined columns; None if the tables define the features."""
    model_features = scenario.model.spec.features
    if model_features is None or not scenario.model.spec.makes_lists:
        return model_features
    joined_columns = (column for join in scenario.data.join.values() for column in join.columns)
    compression_columns = (COUNT, SPAN, KINDS) if scenario.data.events else ()  # `data.events` adds these
    return (*model_features, *joined_columns, *compression_columns)


def _check_nearest(scenario: Scenario, table_by_feature: Mapping[str, str]) -> None:
    """Raise ConfigError if the model's memory compares the rows of items (`nearest`) and some items may have no row."""
    if "nearest" not in scenario.model.list_voters():
        return
    if "item" not in table_by_feature:
        raise ConfigError(
            "model.memory.voters: nearest compares rows of items, and no table has them; add sparse.tables.item"
        )
    name = table_by_feature["item"]
    table = scenario.sparse.tables[name]
    if table.admit or table.evict or table.budget:
        raise ConfigError(
            f"model.memory.voters: nearest needs the rows of all items, and sparse.tables.{name} refuses or evicts some; "
            "leave admit, evict and budget out, or nearest"
        )


def make_tier_arguments(tiers: TierOptions) -> dict[str, Any]:
    """Return the sizes and options of a table's tiers that the scenario states, as `RunSetup.tiers` holds them by table.

    Sizes in bytes are converted into rows later, when the `TableSpec` is known.

    Args:
        tiers: The section `tiers` of the table.
    """
    arguments = {
        "device_rows": tiers.device_rows,
        "device_bytes": tiers.device,
        "policy": tiers.policy,
        "host_rows": tiers.host_rows,
        "host_bytes": tiers.host,
        "folder": tiers.folder,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def has_policy(scenario: Scenario) -> bool:
    """Return whether any table refuses or evicts rows (`admit`, `evict` or `budget`)."""
    return any(table.admit or table.evict or table.budget for table in scenario.sparse.tables.values())


def compute_ttl_steps(
    scenario: Scenario, data: Mapping[str, Any], steps: Mapping[str, int]
) -> dict[str, int]:
    """Compute the time to live in steps of each table that states it as a time.

    Args:
        scenario: The scenario.
        data: Facts of the data, with "train_span_s", the time span of the training events in seconds.
        steps: The number of steps of each stage.

    Returns:
        The number of steps without use after which a row is evicted, by table.

    Raises:
        ConfigError: Rows would be evicted before the next epoch reads them.
    """
    ttl_by_table = {
        name: table.evict.ttl
        for name, table in scenario.sparse.tables.items()
        if table.evict and table.evict.ttl
    }
    if not ttl_by_table:
        return {}
    stage_name, stage = next(
        (name, stage) for name, stage in scenario.stages.items() if not stage.kind.rolls_out
    )
    span_s, epochs = max(1.0, float(data["train_span_s"])), float(getattr(stage, "epochs", None) or 1)
    epoch_steps = steps[stage_name] / epochs
    return {
        table: _compute_lifetime_steps(table, ttl_s, span_s=span_s, epoch_steps=epoch_steps, epochs=epochs)
        for table, ttl_s in ttl_by_table.items()
    }


def _compute_lifetime_steps(
    table: str, ttl_s: float, *, span_s: float, epoch_steps: float, epochs: float
) -> int:
    """Convert a time to live into steps; raise ConfigError if it is shorter than one of several epochs.

    Args:
        table: The name of the table, for the message.
        ttl_s: The time to live, in seconds of event time.
        span_s: The time span of the training events, which an epoch trains, in seconds.
        epoch_steps: The number of steps of an epoch.
        epochs: The number of epochs.
    """
    lifetime_steps = max(1, math.ceil(ttl_s / span_s * epoch_steps))
    if lifetime_steps < epoch_steps and epochs > 1:
        raise ConfigError(
            f"sparse.tables.{table}.evict.ttl: {ttl_s / 86400:g} days are {lifetime_steps} steps of this data, whose training "
            f"events span {span_s / 86400:.1f} days in {epoch_steps:.0f} steps per epoch: rows would be evicted before the next "
            f"epoch reads them. Give at least the data's span, train one epoch, or set evict.ttl_steps"
        )
    return lifetime_steps
