"""The kind `embedding`: the shards of the sparse tables, by default in the trainer's process."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind(
    "nonet.workers.roles:EmbeddingShard",
    args=("run",),
    default={"fuse": "trainer"},
    order=2,
    gang=True,
    keeps="rows",
)
