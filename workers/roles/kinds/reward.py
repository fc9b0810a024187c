"""The kind `reward`: a worker that scores beams."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind("nonet.workers.roles:RewardWorker", order=5, light=True, restarts=True)
