"""The parts of `nonet plan`: choosing the cluster view, checking the scenario, and formatting the plan."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nonet.controller.cluster import ClusterView, read_local_view, read_view
from nonet.controller.plan import Plan
from nonet.errors import ConfigError
from nonet.workers import check_address, start_ray

if TYPE_CHECKING:
    from nonet.deploy.run.api import ScenarioFile


_MAX_VALUE_WIDTH = 90  # characters of a key and its value in the list of origins


def choose_view(cluster: Path | None, address: str | None) -> ClusterView:
    """Read the cluster view to plan for: from a file, from a live Ray cluster, or of this machine.

    Args:
        cluster: A cluster view's file.
        address: The address of a live Ray cluster, or `auto`.

    Raises:
        ConfigError: Both are given, or no Ray answers.
    """
    if cluster and address:
        raise ConfigError("give --cluster (a file) or --address (a live Ray), not both")
    if address:
        return _read_live_view(address)
    return read_view(cluster) if cluster else read_local_view()


def describe_search(source: ScenarioFile, view: ClusterView, as_json: bool, *, allows_absent: bool) -> str:
    """Search placements of a scenario, and describe them as text or JSON, best first.

    Args:
        source: The scenario file.
        view: The cluster.
        as_json: Whether to return JSON.
        allows_absent: Whether the view is of other machines, which may have files that this one lacks.
    """
    from nonet.controller.scenario import check_scenario
    from nonet.controller.search import format_search, make_search_records, search_placements

    check_scenario(source.scenario)
    check_files(source, allows_absent=allows_absent)
    search = search_placements(source.scenario, view)
    return json.dumps(make_search_records(search), indent=1) if as_json else format_search(search)


def describe_plan(source: ScenarioFile, plan: Plan, as_json: bool, *, allows_absent: bool) -> str:
    """Check the files that a scenario names, and describe its plan with warnings about its data, as text or JSON.

    Args:
        source: The scenario file.
        plan: The plan of its scenario.
        as_json: Whether to return JSON.
        allows_absent: Whether the plan is for other machines, which may have files that this one lacks.
    """
    warnings = check_files(source, allows_absent=allows_absent)
    if as_json:
        return json.dumps(plan.as_dict() | ({"data_warnings": warnings} if warnings else {}), indent=1)
    return "\n\n".join(
        filter(None, [plan.format_text(), "\n".join(f"warning: {warning}" for warning in warnings)])
    )


def describe_origins(source: str, changes: list[str] | None, as_json: bool) -> str:
    """Check a scenario, and list where each of its values that is not a default is written, as text or JSON.

    Args:
        source: The scenario's file or the name of a shipped one.
        changes: Changes of the scenario, `a.b=c`.
        as_json: Whether to return JSON.
    """
    from nonet.controller.scenario import hide, load_scenario, read_document

    load_scenario(source, changes)  # Raises an error for a key that does not exist.
    read = read_document(source, changes)
    document = _name_keys(hide(read.document))
    if as_json:
        files = [str(path) for path in (read.path, *read.parents)]
        values = {".".join(keys): origin for keys, origin in read.origins.items()}
        return json.dumps({"files": files, "origins": values}, indent=1)
    rows: list[tuple[str, str]] = []
    for keys, origin in sorted(read.origins.items(), key=lambda row: _find_place(document, row[0])):
        value = document
        for key in keys:
            value = value[key]
        rows.append((f"{'.'.join(keys)}: {_format_value(value)}", origin))
    width = min(_MAX_VALUE_WIDTH, max(len(text) for text, _ in rows))
    return "\n".join(f"{text:{width}}  {origin}" for text, origin in rows)


def _name_keys(value: Any) -> Any:
    """Return a copy of a document in which all keys of maps are strings, as in the paths of origins."""
    if isinstance(value, dict):
        return {str(key): _name_keys(child) for key, child in cast("dict[Any, Any]", value).items()}
    return value


def _find_place(document: Any, keys: tuple[str, ...]) -> tuple[int, ...]:
    """Return the index of each key in its map, by which values are in the order of the document."""
    places: list[int] = []
    for key in keys:
        places.append(list(document).index(key))
        document = document[key]
    return tuple(places)


def _format_value(value: Any) -> str:
    """Return a value of a document as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, cast('list[Any]', value)))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_format_value(part)}' for key, part in cast('dict[str, Any]', value).items())}}}"
    return value if isinstance(value, str) else json.dumps(value)


def summarise_origins(source: str, changes: list[str] | None) -> str:
    """Return one line that counts the values of a scenario by the file that they are written in; "" for a single file."""
    from nonet.controller.scenario import read_document

    read = read_document(source, changes)
    if not read.parents:
        return ""
    counts = Counter(origin.rpartition(":")[0] or origin for origin in read.origins.values())
    files = ", ".join(f"{count} in {file}" for file, count in counts.most_common())
    return f"values written: {files} (--origins lists them)"


def check_files(source: ScenarioFile, *, allows_absent: bool = False) -> list[str]:
    """Check the files of this machine that a scenario names, and print to standard error what is not checked from here.

    Args:
        source: The scenario file.
        allows_absent: Whether an absolute path that does not exist here may exist where the run will be.

    Returns:
        Warnings about joined stores and about the data.

    Raises:
        ConfigError: A key, a reward, its options or a column is wrong.
        DataError: The tables cannot be read, or have too few events.
    """
    from nonet.controller.setup import preflight

    checks = preflight.check_files(source.scenario, source.folder, allows_absent=allows_absent)
    if checks.unchecked:
        print(f"not checked from here: {'; '.join(checks.unchecked)}", file=sys.stderr)
    return checks.warnings


def _read_live_view(address: str) -> ClusterView:
    """Read the view of a live Ray cluster. Raises ConfigError if none answers."""
    import ray

    from nonet.controller.cluster import read_live_view

    suggestion = "start one with `ray start --head`, or plan on a file with --cluster"
    check_address(address, "--address", suggestion)
    try:
        start_ray(address, {"namespace": "nonet"})
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"no Ray answers at {address}, or it wants another token (RAY_AUTH_MODE, RAY_AUTH_TOKEN): "
            f"{' '.join(str(error).split())[:200]}; {suggestion}"
        ) from None
    try:
        return read_live_view()
    finally:
        ray.shutdown()
