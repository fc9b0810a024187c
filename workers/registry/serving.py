"""Serving: which versions answer whom. One small file, replaced whole; servers read it again when it changes.

The default answers everybody but those of a share. A share is drawn by a hash of the user (else of the caller, else of the
request) and of the version, so a user stays with a version, and two versions do not get the same users first. What was rolled
back is refused from then on, and every version made from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nonet.atomic import write_whole
from nonet.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class ServingState:
    """Who is answered by which version.

    Attributes:
        default: The version of most users, None before the first.
        shares: Version -> share of users.
        refused: Versions that were rolled back, and those made from them.
        withdrawn: Items (as text) that nobody is shown.
        turn: How often this was changed.
        salts: Version -> text that the hash of its share is salted with; "" for shares of files written before there were salts.
        followed: The commit that the run's follower published last, None where it has published none (or an older Nonet did).
    """

    default: int | None = None
    shares: dict[int, float] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    withdrawn: tuple[str, ...] = ()
    turn: int = 0
    salts: dict[int, str] = field(default_factory=dict)
    followed: str | None = None

    @property
    def versions(self) -> list[int]:
        """All that answer somebody, the default first."""
        return [] if self.default is None else [self.default, *(v for v in self.shares if v != self.default)]

    def select_version(self, key: str) -> int | None:
        """Return the version that answers a user, caller or request: always the same while nothing changes."""
        left = 1.0  # of the users that no share before has taken
        for version, share in sorted(self.shares.items()):
            if _place(self.salts.get(version, "") + key) < share / left:
                return version
            left -= share
        return self.default

    def promote(self, version: int, share: float | None) -> ServingState:
        """With a version for everybody, or for a share of the users beside the default. Raises ConfigError."""
        if version in self.refused:
            raise ConfigError(
                f"version {version} was rolled back, or made from one that was; promote another, or publish its commit anew "
                "(nonet publish --step N)"
            )
        if share is None or self.default is None:
            return replace(self, default=version, shares={}, salts={}, turn=self.turn + 1)
        if not 0 < share < 1:
            raise ConfigError(
                f"--share {share}: a share of users lies between 0 and 1; leave it out for all of them"
            )
        shares = {v: s for v, s in self.shares.items() if v != version} | {version: share}
        if sum(shares.values()) >= 1:
            raise ConfigError(
                f"shares of {', '.join(map(str, sorted(shares)))} are {sum(shares.values()):g} together"
            )
        # A share that grows keeps its salt, and so its users.
        salt = self.salts.get(version, "" if version in self.shares else f"{version}:")
        return replace(self, shares=shares, salts={**self.salts, version: salt}, turn=self.turn + 1)

    def replace_version(self, old: int, new: int) -> ServingState:
        """With a version in the place of another, for the same users."""
        shares = {new if version == old else version: share for version, share in self.shares.items()}
        salts = {new if version == old else version: salt for version, salt in self.salts.items()}
        default = new if self.default == old else self.default
        return replace(self, default=default, shares=shares, salts=salts, turn=self.turn + 1)

    def roll_back(self, target: int, refused: Collection[int]) -> ServingState:
        """Return the state in which a version answers everybody and others are refused from now on."""
        bad = tuple(sorted({*self.refused, *refused} - {target}))
        return replace(self, default=target, shares={}, salts={}, refused=bad, turn=self.turn + 1)

    def write(self, path: Path) -> None:
        """As a file."""
        body = asdict(self) | {
            "shares": {str(v): share for v, share in self.shares.items()},
            "salts": {str(v): salt for v, salt in self.salts.items()},
        }
        write_whole(path, json.dumps(body, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> ServingState:
        """What `write` wrote; of a file that is not there the first state. Files without salts are read too. Raises
        CheckpointError."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls()
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, source_name: str) -> ServingState:
        """Return what the content of such a file says; `name` is that of errors. Raises CheckpointError."""
        try:
            body = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{source_name} does not say which version is served: {error}") from None
        return cls(
            body["default"],
            {int(v): float(share) for v, share in body["shares"].items()},
            tuple(body["refused"]),
            tuple(body["withdrawn"]),
            body["turn"],
            {int(v): str(salt) for v, salt in body.get("salts", {}).items()},
            body.get("followed"),
        )


def _place(key: str) -> float:
    """Return where a key stands between 0 and 1, the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
