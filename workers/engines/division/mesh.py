"""The device mesh of trainers whose engine divides the model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nonet.errors import ConfigError
from nonet.workers.runtime import Membership

TENSOR = "tensor"
"""Axis of a mesh whose ranks compute the same samples."""


def build_mesh(member: Membership, device_type: str, replicate: int) -> DeviceMesh:
    """Build the device mesh of the trainers. All of them must call it.

    Args:
        member: This rank's membership in the trainers' process group.
        device_type: The type of the ranks' devices.
        replicate: The number of shard groups, each of which has the whole weights; it divides the number of ranks.

    Returns:
        A mesh with the axes `replicate`, `shard` and `tensor`, of which the first and the last are left out if their size is 1.

    Raises:
        ConfigError: The trainers do not fill the mesh.
    """
    if replicate == member.tensor == 1:
        return DeviceMesh.from_group(member.trainers, device_type, mesh_dim_names=("shard",))
    if member.n_trainers % (multiple := replicate * member.tensor):
        raise ConfigError(
            f"roles.trainer.engine: {member.n_trainers} trainers, which must be a multiple of {multiple} (replicate x tensor)"
        )
    ranks = torch.arange(member.n_trainers).view(replicate, -1, member.tensor)
    r, s, t = (ranks == member.rank).nonzero()[0].tolist()
    lines: dict[str, Tensor] = {"replicate": ranks[:, s, t], "shard": ranks[r, :, t]}
    kept = [name for name in lines if name == "shard" or len(lines[name]) > 1]
    groups = [member.make_subgroup(lines[name].tolist()) for name in kept]
    if member.tensor > 1:
        kept, groups = [*kept, TENSOR], [*groups, member.tensor_group]
    shape = [len(lines[name]) if name in lines else member.tensor for name in kept]
    return DeviceMesh.from_group(groups, device_type, ranks.view(shape), mesh_dim_names=tuple(kept))
