"""`nonet versions`, `promote` and `rollback`: they read and change a run's registry; servers apply its changes."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from nonet.controller.record import find_run
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.registry import ServingState, VersionRegistry, open_registry


def find_registry(run: str) -> VersionRegistry:
    """Open the registry of a run.

    Raises:
        ConfigError: No version of the run was published yet, or the folder names an address that this user has not approved.
    """
    folder = find_run(run)
    serving_dir = folder.path / "serving"
    if not (serving_dir / "registry" / "versions").is_dir():
        raise ConfigError(
            f"{run} has no published version yet; `nonet serve {run}` publishes its newest checkpoint"
        )
    return open_registry(serving_dir, owner=folder.describe_owner())


def describe_versions(run: str) -> list[dict[str, Any]]:
    """Return a row (`_describe_version`) for each version of a run, oldest first."""
    registry = find_registry(run)
    serving = registry.serving
    return [_describe_version(registry, serving, number) for number in registry.list_versions()]


def publish_checkpoint(run: str, step: int) -> dict[str, Any]:
    """Publish a checkpoint of a run as a version that does not receive traffic yet.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        step: The checkpoint's step.

    Returns:
        The version's row.

    Raises:
        ConfigError: The checkpoint does not exist or cannot be served.
    """
    from nonet.deploy.opened import OpenedRun

    served_run = OpenedRun.open(run, verb="publish")
    version = served_run.publish_checkpoint(step)
    return _describe_version(served_run.registry, served_run.registry.serving, version.number)


def promote_version(name: str, share: float | None) -> dict[str, Any]:
    """Direct traffic to a version.

    Args:
        name: The version as RUN@NUMBER, such as last@3.
        share: Share of users that the version gets, from 0 to 1; None for all users.

    Returns:
        The new serving state.

    Raises:
        ConfigError: There is no such version.
    """
    run, number = _split_name(name)
    if number is None:
        raise ConfigError(f"{name!r} is not a version; give a run, @ and a number, such as last@3")
    return asdict(find_registry(run).promote(number, share))


def rollback_version(run: str, to: int | None) -> dict[str, Any]:
    """Go back to an earlier version.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`; RUN@NUMBER also gives `to`.
        to: The number of the version to go back to; None for the one before.

    Returns:
        The new serving state.

    Raises:
        ConfigError: There is no version to go back to, or it is named twice.
    """
    named_run, number = _split_name(run)
    if number is not None:
        if to not in (None, number):
            raise ConfigError(f"{run} names version {number}, and --to version {to}; give one of them")
        run, to = named_run, number
    return asdict(find_registry(run).rollback(to))


def _split_name(name: str) -> tuple[str, int | None]:
    """Split RUN@NUMBER into the run and the number of a version; the number is None for a run alone."""
    run, _, number = name.rpartition("@")
    return (run, int(number)) if run and number.isdecimal() else (name, None)


def _describe_version(registry: VersionRegistry, serving: ServingState, number: int) -> dict[str, Any]:
    """Return a row that describes a version: its state, kind, origin, and size in bytes and rows."""
    try:
        version = registry.read_version(number)
    except CheckpointError as error:
        return {"version": number, "state": "torn", "problem": str(error)}
    state = "refused" if number in serving.refused else ""
    if number == serving.default:
        state = "served"
    elif number in serving.shares:
        state = f"{serving.shares[number]:.1%} of users"
    source = version.source
    published_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(source.get("published", 0)))
    return {
        "version": number,
        "state": state or "-",
        "kind": version.kind,
        "base": version.base or 0,
        "stage": source.get("stage", ""),
        "step": source.get("step", 0),
        "published": published_at,
        "bytes": version.written,
        "rows": sum(version.touched.values()),
    }
