"""The verbs of scenarios and runs, and what a kind declares about them.

A kind (a model, source, stage, engine or tokenizer) declares which verbs work for runs that have it. The check of a run is
`check_supported` in `nonet.controller.scenario`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TRAINING_VERBS: tuple[str, ...] = ("run", "resume", "scale", "tune", "submit", "report")
"""Verbs that train a model or show what the training reported, which every kind of model has."""

STEERING_VERBS: tuple[str, ...] = ("tradeoff", "attach", "detach", "set")
"""Verbs that change the rewards of a stage."""

COMPARING_VERBS = ("run --seeds", "report --compare", "evaluate")
"""Verbs that compute metrics of finished runs again, or compare them."""

ANSWERING_VERBS = (
    "recommend",
    "recommend --users",
    "serve",
    "/recommend",
    "/score",
    "score",
    "publish",
    "export",
)
"""Verbs that answer questions by a version of a run, or make one that can; those with a slash are paths of the server."""

ADDING_VERBS = ("items add", "items add --withdraw", "store append")
"""Verbs that add items or events to a finished run."""

VERBS = (
    *TRAINING_VERBS,
    *COMPARING_VERBS,
    *ANSWERING_VERBS,
    *ADDING_VERBS,
    "sids",
    "reward test",
    *STEERING_VERBS,
)
"""Commands, commands with an option, and paths of the server that may depend on the kinds of a scenario."""


@dataclass(frozen=True)
class SupportedVerbs:
    """The verbs that work for runs with a kind.

    Attributes:
        verbs: The verbs that work. A verb that is neither here nor in `lacks` is refused by its name.
        lacks: For verbs that do not work, what to add to "X has model.use: NAME, which ": the reason and the next step.
    """

    verbs: Iterable[str] = VERBS
    lacks: Mapping[str, str] = field(default_factory=dict)

    def find_limit(self, verb: str) -> str | None:
        """Return why a verb does not work, as a part of a sentence; None if it works."""
        if verb in self.lacks:
            return self.lacks[verb]
        if verb in set(self.verbs):
            return None
        return f"does not declare {verb!r} among its verbs; use a kind that does, or declare it there if it works"


ALL_VERBS = SupportedVerbs()
"""The declaration of a kind with which all verbs work."""
