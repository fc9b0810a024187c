"""Serving: which versions answer whom. One small file, replaced whole; servers read it again when it changes.

The default answers everybody but those of a share: users whose hash falls into it, so a user stays with one version. What was
rolled back is refused from then on, and every version made from it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nonet.atomic import write_whole
from nonet.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Serving:
    """default: the version of most users, None before the first; shares: version -> share of users; refused: rolled back;
    withdrawn: items (as text) that nobody is shown; turn: how often this was changed."""

    default: int | None = None
    shares: dict[int, float] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    withdrawn: tuple[str, ...] = ()
    turn: int = 0

    @property
    def versions(self) -> list[int]:
        """All that answer somebody, the default first."""
        return [] if self.default is None else [self.default, *(v for v in self.shares if v != self.default)]

    def version_of(self, user: str) -> int | None:
        """The version that answers a user: always the same while nothing changes."""
        place = _place(user)
        for version, share in sorted(self.shares.items()):
            if place < share:
                return version
            place -= share
        return self.default

    def promoted(self, version: int, share: float | None) -> Serving:
        """With a version for everybody, or for a share of the users beside the default. Raises ConfigError."""
        if version in self.refused:
            raise ConfigError(
                f"version {version} was rolled back, or made from one that was; promote another, or publish its commit anew "
                "(nonet publish --step N)"
            )
        if share is None or self.default is None:
            return replace(self, default=version, shares={}, turn=self.turn + 1)
        if not 0 < share < 1:
            raise ConfigError(
                f"--share {share}: a share of users lies between 0 and 1; leave it out for all of them"
            )
        shares = {v: s for v, s in self.shares.items() if v != version} | {version: share}
        if sum(shares.values()) >= 1:
            raise ConfigError(
                f"shares of {', '.join(map(str, sorted(shares)))} are {sum(shares.values()):g} together"
            )
        return replace(self, shares=shares, turn=self.turn + 1)

    def replaced(self, old: int, new: int) -> Serving:
        """With a version in the place of another, for the same users."""
        shares = {new if version == old else version: share for version, share in self.shares.items()}
        default = new if self.default == old else self.default
        return replace(self, default=default, shares=shares, turn=self.turn + 1)

    def rolled_back(self, to: int, bad: set[int]) -> Serving:
        """To a version; the bad ones are refused from now on."""
        refused = tuple(sorted({*self.refused, *bad} - {to}))
        return replace(self, default=to, shares={}, refused=refused, turn=self.turn + 1)

    def write(self, path: Path) -> None:
        """As a file."""
        body = asdict(self) | {"shares": {str(v): share for v, share in self.shares.items()}}
        write_whole(path, json.dumps(body, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Serving:
        """What `write` wrote; of a file that is not there the first state. Raises CheckpointError."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise CheckpointError(f"{path} does not say which version is served: {error}") from None
        return cls(
            body["default"],
            {int(v): float(share) for v, share in body["shares"].items()},
            tuple(body["refused"]),
            tuple(body["withdrawn"]),
            body["turn"],
        )


def _place(user: str) -> float:
    """Where a user stands between 0 and 1, the same in every process."""
    return int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "big") / 2**64
