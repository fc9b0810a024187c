"""The run that versions belong to, in the file `run.json` beside them.

Two runs at one address, or a new run beside the folder of an old one, would serve each other's weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from nonet.errors import CheckpointError, ConfigError

OWNER = "run.json"


def encode_owner(owner: Mapping[str, str]) -> bytes:
    """Return the content of the file for a run, as `RunFolder.describe_owner` describes it."""
    return json.dumps(dict(owner), indent=1).encode()


def check_owner(content: bytes | None, owner: Mapping[str, str] | None, place: str) -> None:
    """Check that versions belong to a run.

    Args:
        content: The content of the file; None if there is none, as in registries of older versions.
        owner: The run; None if it is not known, which is not checked.
        place: Where the versions are, for messages.

    Raises:
        ConfigError: They belong to another run.
        CheckpointError: The file is damaged.
    """
    if content is None or owner is None:
        return
    try:
        stored = json.loads(content)
        data, start, name = str(stored["data"]), str(stored["start"]), str(stored["run"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{place}/{OWNER} does not say which run the versions belong to ({type(error).__name__}); remove it if they are "
            f"those of {owner['run']}"
        ) from None
    starts = {start, owner["start"]} - {""}  # not known before the first metric
    if data != owner["data"] or len(starts) > 1:
        raise ConfigError(
            f"registry: {place} has the versions of another run ({name[:80]!r}), so {owner['run']} cannot use it; give each run "
            "an address and a folder of its own, or move that one away"
        )
