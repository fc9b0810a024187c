"""The kind `tokenise`: creates the artifacts once, in the evaluator's process."""

from nonet.workers.roles.kinds.base import RoleKind

SPEC = RoleKind("nonet.workers.roles:Tokeniser", order=4)
