"""The kind `evaluator`: ranks held-out events with each checkpoint during training."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind(
    "nonet.workers.roles.evaluation:Evaluator",
    args=("run", "evaluate"),
    default={},
    order=3,
    keeps="weights",
    divides=True,
    beside=("tokenise",),
)
