"""The evaluator: ranks commits beside the training."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind(
    "nonet.workers.roles.evaluation:Evaluator",
    args=("run", "evaluate"),
    default={},
    order=3,
    keeps="weights",
    beside=("tokenise",),
)
