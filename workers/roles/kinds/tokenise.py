"""The kind `tokenise`: creates the artifacts once, in the evaluator's process."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind("nonet.workers.roles.artifacts:Tokeniser", order=4)
