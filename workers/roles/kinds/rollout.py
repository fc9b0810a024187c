"""The kind `rollout`: generates beams for prompts, by default in the trainer's process."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind(
    "nonet.workers.roles:Rollout",
    args=("run",),
    default={"fuse": "trainer"},
    order=1,
    keeps="weights",
    follows_shares=True,
    lists=True,
)
