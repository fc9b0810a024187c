"""The parts of `nonet plan`: choosing the cluster view, checking the scenario, and formatting the plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nonet.controller.cluster import ClusterView, read_local_view, read_view
from nonet.controller.plan import Plan, get_feature_dims
from nonet.errors import ConfigError, PlacementError
from nonet.workers import check_address

_MAX_TABLE_BYTES = 1 << 28  # larger tables are not read for a plan, so that it takes seconds


def choose_view(cluster: Path | None, address: str | None) -> ClusterView:
    """Read the cluster view to plan for: from a file, from a live Ray cluster, or of this machine.

    Args:
        cluster: A cluster view's file.
        address: The address of a live Ray cluster, or `auto`.

    Raises:
        ConfigError: Both are given.
        PlacementError: No Ray answers.
    """
    if cluster and address:
        raise ConfigError("give --cluster (a file) or --address (a live Ray), not both")
    if address:
        return _read_live_view(address)
    return read_view(cluster) if cluster else read_local_view()


def describe_search(source: Any, view: ClusterView, as_json: bool) -> str:
    """Search placements of a scenario, and describe them as text or JSON, best first.

    Args:
        source: The scenario file (`api.ScenarioFile`).
        view: The cluster.
        as_json: Whether to return JSON.
    """
    from nonet.controller.search import format_search, make_search_records, search_placements

    check_scenario(source)
    search = search_placements(source.scenario, view)
    return json.dumps(make_search_records(search), indent=1) if as_json else format_search(search)


def describe_plan(source: Any, plan: Plan, as_json: bool) -> str:
    """Describe the plan of a scenario, with warnings about its data, as text or JSON.

    Args:
        source: The scenario file (`api.ScenarioFile`), which is checked.
        plan: The plan of its scenario.
        as_json: Whether to return JSON.
    """
    warnings = check_scenario(source)
    if as_json:
        return json.dumps(plan.as_dict() | ({"data_warnings": warnings} if warnings else {}), indent=1)
    return "\n\n".join(
        filter(None, [plan.format_text(), "\n".join(f"warning: {warning}" for warning in warnings)])
    )


def check_scenario(source: Any) -> list[str]:
    """Check a scenario as a run does before it starts, including tables that can be read from this machine.

    Args:
        source: The scenario file (`api.ScenarioFile`).

    Returns:
        Warnings about joined stores and about the data.

    Raises:
        ConfigError: A key, a reward, its options or a column is wrong.
        DataError: The tables cannot be read, or have too few events.
    """
    from nonet.controller.scenario import check_runnable
    from nonet.controller.setup import preflight

    scenario, folder = source.scenario, source.folder
    try:
        check_runnable(scenario)
    except ConfigError:  # the plan's own notes report it
        return find_data_warnings(source)
    warnings = preflight.check_definition(scenario, folder)
    return warnings + (preflight.check_data(scenario, folder) if _can_read_tables(source) else [])


def find_data_warnings(source: Any) -> list[str]:
    """Return warnings about the data of a scenario file (`api.ScenarioFile`).

    The list is empty if the tables are not files of this machine, or are larger than a plan should read.
    """
    from nonet.controller.scenario.settings import list_data_warnings, read_data_profile

    data = source.scenario.data
    if not _can_read_tables(source):
        return []
    profile = read_data_profile(data.model_dump(exclude_none=True), source.folder, data.keep.model_dump())
    split = {"use": data.split.use, **data.split.get_options()}
    return list(list_data_warnings(profile, split, get_feature_dims(source.scenario)))


def _can_read_tables(source: Any) -> bool:
    """Return whether the tables are local files that are small enough for a plan to read.

    Raises:
        DataError: A table does not exist.
    """
    from nonet.samples.tables import find_parquet

    data = source.scenario.data
    for path, table in ((data.interactions, "interactions"), (data.items or data.interactions, "items")):
        if "://" in path:
            return False
        location = path if ":" in path else str(source.folder / path)
        filesystem, files = find_parquet(location, table)
        if sum(info.size for info in filesystem.get_file_info(files)) > _MAX_TABLE_BYTES:
            return False
    return True


def _read_live_view(address: str) -> ClusterView:
    """Read the view of a live Ray cluster. Raises PlacementError if none answers."""
    import ray

    from nonet.controller.cluster import read_live_view

    suggestion = "start one with `ray start --head`, or plan on a file with --cluster"
    check_address(address, "--address", suggestion)
    try:
        ray.init(address=address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PlacementError(
            f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}; {suggestion}"
        ) from None
    try:
        return read_live_view()
    finally:
        ray.shutdown()
