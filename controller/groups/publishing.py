"""Publishing: rollouts switch to the trainer's current weights and rows, under one version for both.

Weights are sent in buckets, and are used when all buckets have arrived. Of the rows, those that changed since the version
that the replicas hold are sent, and all of them the first time. If the tables are larger than `replica_bytes`, their rows
are not sent: the shards keep the published version readable by key while training continues. A rollout in the process of
the only trainer reads the live model and tables, so nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nonet.controller.groups.handles import RolloutHandle, TrainerHandle
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture, Replicate


@dataclass(frozen=True, slots=True)
class Published:
    """What rollouts have of the trainer's weights and rows. Only the number of the version leaves the controller.

    Attributes:
        version: The number of the newest published version of a run; 0 before the first.
        weights_version: The version of the dense weights that were sent; None if all must be sent.
        rows_version: The version of the rows that the replicas hold; None if all must be sent.
        route: How rows get to the rollouts: shared | full | delta | by key; "" if nothing was published by this process.
    """

    version: int = 0
    weights_version: int | None = None
    rows_version: int | None = None
    route: str = ""

    def forget_rows(self) -> Published:
        """Return the value after trainers have loaded other rows, which differ from those of any version that was sent."""
        return replace(self, rows_version=None)


def publish(
    trainer: TrainerHandle,
    rollout: RolloutHandle,
    published: Published,
    replica_bytes: int,
    stage: StageSetup | None,
    *,
    in_background: bool = False,
) -> Published:
    """Publish the trainer's weights and rows to the rollouts under the next version.

    Args:
        trainer: The trainer.
        rollout: The rollout.
        published: What was published before.
        replica_bytes: The largest size of all tables together with which they are copied to rollouts.
        stage: The RL stage for which it is published, so that a trainer and a rollout that share a device take turns on it;
            None if neither is offloaded.
        in_background: Whether to return before the ranks have switched; each switches before its next prompts.

    Returns:
        What is published now.
    """
    version = published.version + 1
    if stage is not None:
        trainer.ensure_on_device(stage)
    fused = rollout.group.hosts is trainer.group.hosts
    reads_live = fused and not trainer.apart and trainer.group.world == 1
    # With the version that rollouts hold, trainers export only the weights that changed since.
    versions = (version, published.weights_version) if trainer.delta else ()
    buckets = (
        [] if fused else [trainer.group.export_weights(index, *versions) for index in range(trainer.buckets)]
    )
    route, rows, row_calls = (
        ("shared", {}, [])
        if reads_live
        else _send_rows(trainer, version, published.rows_version, replica_bytes)
    )
    if stage is not None:
        rollout.ensure_on_device(stage.name)
    receive_calls = [rollout.group.receive(version, bucket) for bucket in buckets]
    options = ({"dense": True} if buckets else {}) | rows
    in_background = in_background and route != "by key"
    rollout.apply(version, options, [*receive_calls, *row_calls], in_background=in_background)
    rows_version = version if route in ("full", "delta") else None
    return Published(version, version if buckets else None, rows_version, route)


def _send_rows(
    trainer: TrainerHandle, version: int, since: int | None, replica_bytes: int
) -> tuple[str, dict[str, Any], list[GroupFuture]]:
    """Start sending the rows of a version, or only those that changed `since` an earlier one.

    Returns:
        How they are sent (full | delta | by key), the arguments of `apply` for them, and further calls to wait for.
    """
    shards = trainer.shards
    if trainer.count_replica_bytes() <= replica_bytes:
        return "delta" if since is not None else "full", {"sparse": shards.export(version, since)}, []
    publish_call = shards.publish(version)
    return (
        "by key",
        {"slices": shards.slice_map(), "shards": Replicate(list(shards.hosts.actors))},
        [publish_call],
    )
