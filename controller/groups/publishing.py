"""Publishing: rollouts switch to the trainer's current weights and rows, under one version for both.

Weights are sent in buckets, and are used when all buckets have arrived. Of the rows, those that changed since the version
that the replicas hold are sent, and all of them the first time. If the tables are larger than `replica_bytes`, their rows
are not sent: the shards keep the published version readable by key while training continues. A rollout in the process of
the only trainer reads the live model and tables, so nothing is sent.
"""

from __future__ import annotations

from typing import Any

from nonet.controller.groups.handles import RolloutHandle, TrainerHandle
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture, Replicate, get_all


def publish(
    trainer: TrainerHandle,
    rollout: RolloutHandle,
    version: int,
    replica_bytes: int,
    stage: StageSetup | None,
    *,
    in_background: bool = False,
) -> dict[str, Any]:
    """Publish the trainer's weights and rows to the rollouts under a version.

    Args:
        trainer: The trainer.
        rollout: The rollout.
        version: The version to publish.
        replica_bytes: The largest size of all tables together with which they are copied to rollouts.
        stage: The RL stage for which it is published, so that a trainer and a rollout that share a device take turns on it;
            None if neither is offloaded.
        in_background: Whether to return before the ranks have switched; each switches before its next prompts.

    Returns:
        The version and how the rows were sent: {"version", "rows": shared | full | delta | by key}.
    """
    if stage is not None:
        trainer.ensure_on_device(stage)
    fused = rollout.group.hosts is trainer.group.hosts
    reads_live = fused and not trainer.apart and trainer.group.world == 1
    # With the version that rollouts hold, trainers export only the weights that changed since.
    versions = (version, rollout.weights_version) if trainer.delta else ()
    buckets = (
        [] if fused else [trainer.group.export_weights(index, *versions) for index in range(trainer.buckets)]
    )
    route, rows, row_calls = (
        ("shared", {}, []) if reads_live else _send_rows(trainer, rollout, version, replica_bytes)
    )
    if stage is not None:
        rollout.ensure_on_device(stage.name)
    receive_calls = [rollout.group.receive(version, bucket) for bucket in buckets]
    apply_call = rollout.group.apply(version, **({"dense": True} if buckets else {}), **rows)
    if in_background and route != "by key":
        ended = [call for call in rollout.pending_applies if call.done()]
        rollout.absent = sum(call.get(trainer.deadlines.step) for call in ended)
        rollout.pending_applies = [
            *(call for call in rollout.pending_applies if call not in ended),
            apply_call,
        ]
    else:
        *_, rollout.absent = get_all(trainer.deadlines.step, *receive_calls, *row_calls, apply_call)
    rollout.weights_version = version if buckets else None
    trainer.version = version
    rollout.version, rollout.rows_version = version, version if route in ("full", "delta") else None
    return {"version": version, "rows": route}


def _send_rows(
    trainer: TrainerHandle, rollout: RolloutHandle, version: int, replica_bytes: int
) -> tuple[str, dict[str, Any], list[GroupFuture]]:
    """Start sending the rows of a version.

    Returns:
        How they are sent (full | delta | by key), the arguments of `apply` for them, and further calls to wait for.
    """
    shards = trainer.shards
    if trainer.count_replica_bytes() <= replica_bytes:
        since = rollout.rows_version  # only rows that changed since this version are sent
        return "delta" if since is not None else "full", {"sparse": shards.export(version, since)}, []
    publish_call = shards.publish(version)
    return (
        "by key",
        {"slices": shards.slice_map(), "shards": Replicate(list(shards.hosts.actors))},
        [publish_call],
    )
