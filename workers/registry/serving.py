"""The serving state: which versions answer which users. One small file, replaced atomically; servers reload it when it changes.

The default version answers all users except those in the share of another version. The users of a share are drawn by a
hash of the user (else of the caller, else of the request) and of the version, so a user stays with a version, and two
versions do not get the same users first. Versions that were rolled back are refused from then on: they, and all
versions made from them, cannot be promoted.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from nonet.atomic import write_whole
from nonet.errors import CheckpointError, ConfigError
from nonet.options import describe_invalid
from nonet.workers.registry.version import VersionNumber

_REMEMBERED_CHANGES = 32
_FIRST_FIELDS = (
    "default",
    "shares",
    "refused",
    "withdrawn",
    "turn",
)  # which files of all versions of Nonet have


@dataclass(frozen=True, slots=True)
class ServingState:
    """The serving state.

    Attributes:
        default: The version of all users that are in no share; None before the first version is served.
        shares: By version, its share of the users in (0, 1).
        refused: Versions that were rolled back, and those made from them.
        withdrawn: Items (as text) that are left out of all answers.
        turn: Number of changes.
        salts: By version, the salt of the hash of its share; "" for shares of files written before there were salts.
        followed: The checkpoint that the run's follower published last; None if it has published none, or an older Nonet
            did.
        changes: Random names of the last changes, by which a writer that got no answer knows whether its change was made.
    """

    default: VersionNumber | None = None
    shares: dict[VersionNumber, Annotated[float, Field(gt=0, lt=1)]] = field(default_factory=dict)
    refused: tuple[VersionNumber, ...] = ()
    withdrawn: tuple[str, ...] = ()
    turn: int = 0
    salts: dict[VersionNumber, str] = field(default_factory=dict)
    followed: str | None = None
    changes: tuple[str, ...] = ()

    @property
    def versions(self) -> list[int]:
        """The versions that currently receive traffic, the default first."""
        return [] if self.default is None else [self.default, *(v for v in self.shares if v != self.default)]

    def select_version(self, key: str) -> int | None:
        """Return the version that answers a user, caller or request; stable while the state does not change."""
        remaining = 1.0  # Share of the users that no earlier version in this loop gets.
        for version, share in sorted(self.shares.items()):
            if _hash_to_unit(self.salts.get(version, "") + key) < share / remaining:
                return version
            remaining -= share
        return self.default

    def promote(self, version: int, share: float | None, *, is_refused: bool = False) -> ServingState:
        """Return the state in which a version answers all users, or a share of them beside the default.

        Args:
            version: The version.
            share: Share of the users in (0, 1), None for all.
            is_refused: Whether the version is made from one that was rolled back.

        Raises:
            ConfigError: The version was rolled back, or the shares are out of range.
        """
        if is_refused or version in self.refused:
            raise ConfigError(
                f"version {version} was rolled back, or made from one that was; promote another, or publish its checkpoint anew "
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
        """Return the state in which a version takes the place of another, for the same users."""
        default = new if self.default == old else self.default
        shares: dict[int, float] = {}
        for version, share in self.shares.items():
            number = new if version == old else version
            shares[number] = shares.get(number, 0.0) + share
        shares.pop(default or 0, None)  # its users are answered by the default version anyway
        salts = {new if version == old else version: salt for version, salt in self.salts.items()}
        return replace(self, default=default, shares=shares, salts=salts, turn=self.turn + 1)

    def roll_back(self, target: int, refused: Collection[int]) -> ServingState:
        """Return the state in which a version answers all users, and others are refused besides those refused before."""
        all_refused = tuple(sorted({*self.refused, *refused} - {target}))
        return replace(self, default=target, shares={}, salts={}, refused=all_refused, turn=self.turn + 1)

    def make_successor(self, old: ServingState) -> ServingState:
        """Return this state as the one that follows another: with the next turn, and a name of this change."""
        changes = (*old.changes, secrets.token_hex(8))[-_REMEMBERED_CHANGES:]
        return replace(self, turn=old.turn + 1, changes=changes)

    def encode(self) -> bytes:
        """Return the content of the state's file."""
        body = asdict(self) | {
            "shares": {str(v): share for v, share in self.shares.items()},
            "salts": {str(v): salt for v, salt in self.salts.items()},
        }
        return json.dumps(body, indent=1).encode()

    def write(self, path: Path) -> None:
        """Write the state to a file atomically."""
        write_whole(path, self.encode())

    @classmethod
    def parse(cls, text: bytes, source_name: str) -> ServingState:
        """Parse the content of a file. Files without salts are supported.

        Args:
            text: The content.
            source_name: Name of the file, for messages.

        Raises:
            CheckpointError: The content is damaged.
        """
        try:
            serving = _SCHEMA.validate_json(text, strict=True)
        except ValidationError as error:
            raise CheckpointError(
                f"{source_name} does not say which version is served: {describe_invalid(error)}"
            ) from None
        problem = ""
        if missing := [name for name in _FIRST_FIELDS if name not in json.loads(text)]:
            problem = f"{missing[0]} is missing"
        elif sum(serving.shares.values()) >= 1:
            problem = f"the shares are {sum(serving.shares.values()):g} together"
        if problem:
            raise CheckpointError(f"{source_name} does not say which version is served: {problem}")
        return serving


_SCHEMA = TypeAdapter(ServingState)


def _hash_to_unit(key: str) -> float:
    """Hash a key to a number in [0, 1), the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
