"""What a run must have before it can be served, told without loading torch."""

from __future__ import annotations

from nonet.controller.record import RunFolder
from nonet.errors import ConfigError


def artifacts_of(folder: RunFolder) -> dict[str, str]:
    """The artifacts of a run by kind. Raises ConfigError where there is nothing in it to recommend from."""
    facts = folder.read_facts()
    if facts is None:
        raise ConfigError(f"{folder.id} has not tokenised its data yet: there is nothing to serve")
    if "sids" not in facts["artifacts"]:
        raise ConfigError(f"{folder.id} predicts clicks: it scores events and has nothing to recommend from")
    return {kind: each["path"] for kind, each in facts["artifacts"].items()}
