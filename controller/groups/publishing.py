"""Publishing: rollout moves to the trainer's weights and rows, under one version for both.

Weights go bucket by bucket, and are served when all of them have come. Rows go as what was touched since the version that
the replicas hold, everything the first time; tables over `count_replica_bytes` stay with their shards, which keep the published
version readable by key while training goes on. A rollout in the process of the only trainer reads the live model and
tables: nothing is sent.
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
    """Move rollout to a version of the trainer's weights and rows.

    Args:
        trainer: The trainer.
        rollout: The rollout.
        version: The version to publish.
        replica_bytes: The largest size of tables that are copied to rollouts.
        stage: The RL stage that it is for; trainer and rollout that share a device are moved to it in turn.
        in_background: Whether not to wait for ranks that are still generating; each takes the version over before its next
            prompts.

    Returns:
        The version and how the rows were sent: {"version", "rows": shared | full | delta | by key}.
    """
    if stage is not None:
        trainer.ensure_on_device(stage)
    fused = rollout.group.hosts is trainer.group.hosts
    whole = fused and not trainer.apart and trainer.group.world == 1
    asked = (version, rollout.weights) if trainer.delta else ()
    buckets = (
        [] if fused else [trainer.group.export_weights(number, *asked) for number in range(trainer.buckets)]
    )
    how, rows, waits = ("shared", {}, []) if whole else _send_rows(trainer, rollout, version, replica_bytes)
    if stage is not None:
        rollout.ensure_on_device(stage.name)
    came = [rollout.group.receive(version, bucket) for bucket in buckets]
    applied = rollout.group.apply(version, **({"dense": True} if buckets else {}), **rows)
    if in_background and how != "by key":
        done = [each for each in rollout.owed if each.done()]
        rollout.absent = sum(each.get(trainer.deadlines.step) for each in done)
        rollout.owed = [*(each for each in rollout.owed if each not in done), applied]
    else:
        *_, rollout.absent = get_all(trainer.deadlines.step, *came, *waits, applied)
    rollout.weights = version if buckets else None
    trainer.version = version
    rollout.version, rollout.holds = version, version if how in ("full", "delta") else None
    return {"version": version, "rows": how}


def _send_rows(
    trainer: TrainerHandle, rollout: RolloutHandle, version: int, replica_bytes: int
) -> tuple[str, dict[str, Any], list[GroupFuture]]:
    """Return how the rows are sent, the arguments of `apply` for them, and further calls to wait for."""
    shards = trainer.shards
    if trainer.count_replica_bytes() <= replica_bytes:
        have = rollout.holds
        return "delta" if have is not None else "full", {"sparse": shards.export(version, have)}, []
    published = shards.publish(version)
    return (
        "by key",
        {"slices": shards.slice_map(), "shards": Replicate(list(shards.hosts.actors))},
        [published],
    )
