"""The kind `trainer`: trains the model."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind(
    "nonet.workers.roles:Trainer",
    args=("run",),
    default={},
    order=0,
    gang=True,
    keeps="training",
    follows_shares=True,
)
