"""Registry: the published versions of a run in a folder, and the file that says which of them are served.

    versions/000001.json   manifests            blobs/<sha256>   their files            serving.json   what is served

A version is published from a complete checkpoint of the run. Publishing writes blobs, then the manifest,
then, if requested, `serving.json`, so a reader finds a version complete or not at all. A version with a base stores only
the rows that changed (a delta); they are found by comparison with the base, so a publisher need not track them. A lock
admits one publisher at a time. A second lock is held only while `serving.json` changes, so that promotions, rollbacks
and withdrawals do not wait for a publisher that writes files. Nobody waits longer than some time for a process that holds a
lock, which may be suspended.

A damaged manifest makes its own version unreadable and those that need its rows; every other version can be served, renewed and
followed by new ones. `run.json` says which run the versions belong to; folders of older versions lack it until they change.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nonet.atomic import make_folder, read_content, write_whole
from nonet.embedding.reading import MappedReader, RowLayer
from nonet.embedding.tables import TableSpec
from nonet.errors import CheckpointError, ConfigError, StaleVersion
from nonet.storage import hold_lock_within
from nonet.workers.registry.blobs import BlobStore
from nonet.workers.registry.contents import VersionContents, store_contents
from nonet.workers.registry.owner import OWNER, check_owner, encode_owner
from nonet.workers.registry.serving import ServingState
from nonet.workers.registry.version import DELTA, FULL, MAX_NUMBER, Version

_CHANGE_WAIT_S = 60.0  # the longest wait for another process that changes what is served
_PUBLISH_WAIT_S = 900.0  # the same for another publisher, which writes files
SERVING = "serving.json"
NUMBER = re.compile(r"0*[1-9][0-9]{0,17}")  # the number of a version, as the name of its manifest
_Result = TypeVar("_Result")


class VersionRegistry:
    """The versions in a folder, which is created if it does not exist.

    Args:
        root: The folder.
        owner: The run whose versions they are, as `RunFolder.describe_owner` returns it; None if it is not known, which is not
            checked.

    Attributes:
        problem: Why it is not known what is served, although it was or there are versions; None if it is known.

    Raises:
        ConfigError: The folder has the versions of another run.
        CheckpointError: What says whose versions they are is damaged.
    """

    def __init__(self, root: Path, owner: Mapping[str, str] | None = None):
        self.root, self.owner = root, owner
        self.problem: str | None = None
        self._has_read_serving = False
        self.blobs = BlobStore(root / "blobs")
        make_folder(root / "versions")
        owner_file = root / OWNER
        check_owner(read_content(owner_file) if owner_file.exists() else None, owner, str(root))

    # --- Reading ----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> ServingState:
        """The serving state that `serving.json` contains now; the initial state before there is a version.

        Raises:
            CheckpointError: The file is damaged, or missing although there are versions.
        """
        path = self.root / SERVING
        text = read_content(path) if path.exists() else None
        has_versions = text is None and bool(VersionRegistry.list_versions(self))
        self._check_serving(text, str(path), has_versions=has_versions)
        return ServingState() if text is None else ServingState.parse(text, str(path))

    @property
    def announced(self) -> ServingState:
        """The newest known serving state; in a remote registry its versions may not be downloaded to this host yet."""
        return self.serving

    def list_versions(self) -> list[int]:
        """Return the numbers of all versions, ascending."""
        names = (path.stem for path in (self.root / "versions").glob("*.json"))
        return sorted(int(name) for name in names if NUMBER.fullmatch(name))

    def read_version(self, number: int) -> Version:
        """Read the manifest of a version.

        Raises:
            ConfigError: There is no such version.
            CheckpointError: The manifest is damaged.
        """
        path = self._locate_manifest(number)
        if not path.exists():
            newest = ", ".join(map(str, self.list_versions()[-10:])) or "none"
            raise ConfigError(f"there is no version {number}; the newest versions are: {newest}")
        return Version.read(path)

    def list_readable(self) -> list[Version]:
        """Return the manifests of all versions that are not damaged, ascending."""
        versions = map(self._read_if_intact, self.list_versions())
        return [version for version in versions if version is not None]

    def list_lineage(self, number: int) -> list[Version]:
        """Return a version and its ancestors, the newest first, up to the first one whose manifest is damaged.

        Raises as `read_version`, if the version itself cannot be read.
        """
        versions = [self.read_version(number)]
        while (base := versions[-1].base) is not None and (version := self._read_if_intact(base)) is not None:
            versions.append(version)
        return versions

    def map_layers(self, number: int) -> dict[str, list[RowLayer]]:
        """Memory-map the rows of a version.

        Returns:
            The layers of each table, oldest first: the rows of the newest full version among the version and its ancestors,
            then those of the deltas since.

        Raises:
            CheckpointError: Neither the version nor an ancestor is a full version.
        """
        newest_first: list[Version] = []
        current: int | None = number
        while current is not None and not (newest_first and newest_first[-1].kind == FULL):
            newest_first.append(self.read_version(current))
            current = newest_first[-1].base
        if newest_first[-1].kind != FULL:
            raise CheckpointError(
                f"version {number} cannot be read: neither it nor any version that it is based on is full"
            )
        layers: dict[str, list[RowLayer]] = {}
        for version in reversed(newest_first):
            for table, blobs in version.rows.items():
                paths = {name: self.blobs.locate(blob, f"rows of {table!r}") for name, blob in blobs.items()}
                layers.setdefault(table, []).append(RowLayer.map_files(paths))
        return layers

    def open_rows(self, number: int, specs: Mapping[str, TableSpec]) -> MappedReader:
        """Return a reader of the memory-mapped rows of a version."""
        return MappedReader(number, self.map_layers(number), specs)

    def locate_files(self, version: Version) -> tuple[Path, dict[str, Path]]:
        """Check the files of a version against their hashes.

        Returns:
            The file of the dense weights, and those of the transition counts by name.
        """
        counts = {name: self.blobs.locate(blob, f"counts ({name})") for name, blob in version.counts.items()}
        return self.blobs.locate(version.dense, "dense weights"), counts

    # --- Changing ---------------------------------------------------------------------------------------------

    def publish(self, contents: VersionContents, *, base: int | None = None, serve: bool = True) -> Version:
        """Publish a new version.

        If the checkpoint was published before, its version is returned. With `serve` that version is promoted, unless it
        was rolled back or the checkpoint is the last one that a call with `serve` published: then an operator has chosen
        since what is served. Without `serve`, a checkpoint whose versions were all rolled back gets a new version, since
        such a call is an operator's request.

        Args:
            contents: The content of the version.
            base: The version that it is made from, None for none.
            serve: Whether to make it the default version; true for the run's own publisher, false for an operator's request.

        Returns:
            The new version, or the version of a checkpoint that was published before.

        Raises:
            StaleVersion: The base was rolled back. No version is written.
        """
        commit = contents.source.get("commit")
        added: list[Version] = []  # by an earlier attempt of `add_version`

        def follow_published() -> Version | None:
            published = self._find_published(commit, serve)
            if published is None:
                self._check_base(base)
            elif serve:
                self._follow_commit(published, commit)
            return published

        def add_version() -> Version:
            if not added:
                self._store_first_serving()
                # The base may have been rolled back while the files were written.
                published = follow_published()
                if published is not None:
                    return published
                added.append(self._add_version(version))
            if serve:
                self._check_base(base)
                serving = self.serving.promote(added[0].number, None)
                self._store_serving(replace(serving, followed=commit))
            return added[0]

        with self._lock_publishing():
            published = self._change(follow_published)
            if published is not None:
                return published
            version = self._prepare(contents, base)
            return self._change(add_version)

    def _find_published(self, commit: str | None, serve: bool) -> Version | None:
        """Return a version of a checkpoint: the default version if it is one, else the newest that was not rolled back.

        Args:
            commit: The checkpoint; None for none.
            serve: Whether to return a version that was rolled back, if all were.
        """
        if commit is None:
            return None
        serving = self.serving
        published = [version for version in self.list_readable() if version.source.get("commit") == commit]
        not_refused = [
            version for version in published if self._find_refused(version.number, serving) is None
        ]
        served = [version for version in not_refused if version.number == serving.default]
        for versions in (served, not_refused, published if serve else []):
            if versions:
                return versions[-1]
        return None

    def _follow_commit(self, version: Version, commit: str | None) -> None:
        """Promote the version of a checkpoint, and record the checkpoint as the last one that was followed.

        Nothing changes if the version was rolled back or the checkpoint was already the last one followed. To follow a
        checkpoint is to publish it with `serve`.
        """
        serving = self.serving
        followed = serving.followed
        if followed is None:
            # An older Nonet followed every checkpoint except those that an operator requested.
            followed_versions = [v for v in self.list_readable() if not v.source.get("asked")]
            followed = followed_versions[-1].source.get("commit") if followed_versions else None
        if followed == commit or self._find_refused(version.number, serving) is not None:
            return
        if version.number != serving.default:
            serving = serving.promote(version.number, None)
        self._store_serving(replace(serving, followed=commit))

    def _check_base(self, base: int | None) -> None:
        """Raise StaleVersion if the base version was rolled back."""
        serving = self.serving
        if base is not None and self._find_refused(base, serving) is not None:
            raise StaleVersion(
                f"version {base} was rolled back, so no version can be based on it; use version {serving.default} as the base"
            )

    def _find_refused(self, number: int, serving: ServingState) -> int | None:
        """Return the version itself or the ancestor whose rollback forbids to serve a version; None if none does.

        Ancestors of the default version forbid nothing to what is made from it, since it was kept when they were rolled back.
        """
        kept = set() if serving.default is None else set(self._list_lineage_numbers(serving.default))
        for ancestor in self._list_lineage_numbers(number):
            if ancestor in serving.refused and (ancestor == number or ancestor not in kept):
                return ancestor
        return None

    def renew(self, number: int, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """Publish the weights and rows of a version with another catalogue, and serve the new version in place of the old one.

        A version with the same weights, rows and catalogue is used if there is one. If it was rolled back, it is not served.

        Args:
            number: The version whose weights and rows are used.
            catalogue: Version of the catalogue's trie.
            counts: Files of the transition counts by name; other files of the version stay.

        Returns:
            The version with that catalogue.

        Raises:
            StaleVersion: The version was rolled back, or is made from one that was.
        """
        with self._lock_publishing():
            return self._change(lambda: self._renew(number, catalogue, counts))

    def renew_served(self, catalogue: str, counts: Mapping[str, Path]) -> None:
        """Do what `renew` does for every version that receives traffic, by default or for a share of the users."""

        def renew_all() -> None:
            for number in self.serving.versions:
                self._renew(number, catalogue, counts)

        with self._lock_publishing():
            self._change(renew_all)

    def _renew(self, number: int, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """Do what `renew` does, while the locks are held."""
        old = self.read_version(number)
        if old.catalogue == catalogue:
            return old
        self._check_base(number)
        origin = self._find_origin(old)
        equal = [
            version
            for version in self.list_readable()
            if version.catalogue == catalogue and self._find_origin(version) == origin
        ]
        serving = self.serving
        servable = [version for version in equal if self._find_refused(version.number, serving) is None]
        renewed = (servable or equal or [None])[-1] or self._add_renewed(old, catalogue, counts)
        if number in serving.versions and (servable or not equal):
            self._store_serving(serving.replace_version(number, renewed.number))
        return renewed

    def _add_renewed(self, old: Version, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """Add a version with the weights and rows of an old one and another catalogue, and return it."""
        stored = {name: self.blobs.put_file(path) for name, path in counts.items()}
        renewed = Version(
            number=old.number + 1,  # until it is added
            base=old.number,
            kind=DELTA,
            source=old.source | {"published": time.time()},
            catalogue=catalogue,
            dense=old.dense,
            counts={**old.counts, **{name: blob for name, (blob, _) in stored.items()}},
            rows={},
            written=sum(new_bytes for _, new_bytes in stored.values()),
        )
        return self._add_version(renewed)

    def _find_origin(self, version: Version) -> int:
        """Return the number of the version that a version has its weights and rows from by renewals, else its own."""
        while version.base is not None and not version.rows:
            base = self._read_if_intact(version.base)
            if base is None or base.dense != version.dense:
                break
            version = base
        return version.number

    def promote(self, number: int, share: float | None = None) -> ServingState:
        """Serve a version to all users or to a share of them.

        Args:
            number: The version.
            share: Share of the users in (0, 1), None for all.

        Returns:
            The new serving state.

        Raises:
            ConfigError: There is no such version, it was rolled back or made from one that was, or the share is out of range.
        """

        def promote() -> ServingState:
            self.read_version(number)
            serving = self.serving
            refused = self._find_refused(number, serving)
            return self._store_serving(serving.promote(number, share, is_refused=refused is not None))

        return self._change(promote)

    def rollback(self, to: int | None = None) -> ServingState:
        """Serve an earlier version again, and refuse the versions that it replaces.

        A refused version cannot be promoted again, and neither can versions that are based on it, or those with an older
        catalogue that it has its weights from. Without `to`, versions that have a share are refused, and the default version
        stays. If no version has a share, the default version is refused and its newest ancestor that has other weights and was
        not refused before is served. With `to`, the default version, its ancestors and every version that has a share are
        refused, except `to` and the ancestors of `to`.

        Args:
            to: The version to serve.

        Returns:
            The new serving state.

        Raises:
            ConfigError: No version is served, or the default version has no ancestor that was not refused.
            DeadlineExceeded: Another process holds the lock.
        """
        return self._change(lambda: self._roll_back(to))

    def _roll_back(self, to: int | None) -> ServingState:
        """Do what `rollback` does, while the lock is held."""
        serving = self.serving
        if serving.default is None:
            raise ConfigError("the run serves no version, so there is nothing to roll back")
        lineage = set(self._list_lineage_numbers(serving.default))
        if to is None and serving.shares:
            target, accepted, refused = serving.default, lineage, set(serving.shares)
        else:
            target = to if to is not None else self._find_rollback_target(serving)
            accepted = {version.number for version in self.list_lineage(target)}
            refused = (lineage | set(serving.shares)) - accepted
        refused |= {equal for number in refused for equal in self._list_same_weights(number)} - accepted
        for version in self.list_readable():  # In ascending order, since a base has a lower number.
            if version.base in refused and version.number not in accepted:
                refused.add(version.number)
        return self._store_serving(serving.roll_back(target, refused))

    def _find_rollback_target(self, serving: ServingState) -> int:
        """Return the newest ancestor of the default version that has other weights and was not rolled back.

        Raises:
            ConfigError: There is no such ancestor.
        """
        assert serving.default is not None
        equal = self._list_same_weights(serving.default)
        for number in self._list_lineage_numbers(serving.default)[len(equal) :]:
            if number not in serving.refused:
                return number
        raise ConfigError(
            f"version {serving.default} cannot be rolled back: it has no ancestor with other weights that was not rolled back; "
            "publish another checkpoint (nonet publish --step N) and promote it, or go back to an older catalogue (--to N)"
        )

    def _list_same_weights(self, number: int) -> list[int]:
        """Return the number of a version and of those whose weights and rows renewals gave to it, the newest first."""
        lineage = self._list_lineage_numbers(number)
        version = self._read_if_intact(number)
        return lineage[: 1 if version is None else lineage.index(self._find_origin(version)) + 1]

    def withdraw(self, items: set[str]) -> ServingState:
        """Exclude items, given by id, from all recommendations, instead of the items that were withdrawn before.

        Returns:
            The new serving state.
        """

        def withdraw() -> ServingState:
            return self._store_serving(replace(self.serving, withdrawn=tuple(sorted(items))))

        return self._change(withdraw)

    def _list_lineage_numbers(self, number: int) -> list[int]:
        """Return the numbers of `list_lineage`; that of the version alone if it cannot be read."""
        is_readable = self._read_if_intact(number) is not None
        return [version.number for version in self.list_lineage(number)] if is_readable else [number]

    def _read_if_intact(self, number: int) -> Version | None:
        """Read the manifest of a version, None if it is damaged or missing."""
        try:
            return self.read_version(number)
        except (CheckpointError, ConfigError):
            return None

    # --- Storing, which a registry at an address does in its own way --------------------------------------------

    def _change(self, change: Callable[[], _Result]) -> _Result:
        """Return the result of a function that reads the registry, and adds a version or changes what is served.

        It is called while no other process changes the registry, and may be called again if it has changed nothing.
        """
        with self._lock():
            self._store_owner()
            return change()

    def _add_version(self, version: Version) -> Version:
        """Add a version under the next number, as a step of `_change`, and return it."""
        added = replace(version, number=self._find_next_number())
        added.write(self._locate_manifest(added.number))
        return added

    def _find_next_number(self) -> int:
        """Return the number that the next version gets. Raises ConfigError if no version can follow."""
        newest = max(self.list_versions(), default=0)
        if newest >= MAX_NUMBER:
            raise ConfigError(
                f"{self._locate_manifest(newest)} has the largest number of a version, so no version can follow it; Nonet has "
                "not written it, so remove it"
            )
        return newest + 1

    def _check_serving(self, text: bytes | None, place: str, *, has_versions: bool) -> None:
        """Set `problem`, and check that the serving state is there if it was read before or there are versions.

        Args:
            text: The content of its file; None if there is no file.
            place: Where the file is, for messages.
            has_versions: Whether there are versions.

        Raises:
            CheckpointError: It is not there.
        """
        self._has_read_serving |= text is not None
        if text is not None or not (self._has_read_serving or has_versions):
            self.problem = None
        else:
            self.problem = (
                f"{place} is missing, so it is not known which versions are served or were rolled back, and which items are "
                "withdrawn; put it back from a copy, or remove the folder of the versions to publish anew"
            )
            raise CheckpointError(self.problem)

    def _store_first_serving(self) -> None:
        """Store the initial serving state before the first version, as a step of `_change`."""
        if not (self.root / SERVING).exists() and self.serving == ServingState():
            self._write_serving(ServingState(changes=(secrets.token_hex(8),)))

    def _store_serving(self, serving: ServingState) -> ServingState:
        """Store a changed serving state, as a step of `_change`, and return what was stored."""
        old = self.serving
        serving = serving.make_successor(old)
        self._write_serving(serving)
        return serving

    def _write_serving(self, serving: ServingState) -> None:
        """Replace the serving state."""
        serving.write(self.root / SERVING)

    def _store_owner(self) -> None:
        """Record which run the versions belong to, if that is known and was not recorded before."""
        if self.owner is not None and not (self.root / OWNER).exists():
            write_whole(self.root / OWNER, encode_owner(self.owner))

    def _prepare(self, contents: VersionContents, base: int | None) -> Version:
        """Write the files of a version, and return its manifest, whose number is not known before it is added."""
        merged_file = self.root / ".whole.safetensors"
        return store_contents(contents, self.blobs, base, self._map_base(base), merged_file)

    def _map_base(self, base: int | None) -> dict[str, list[RowLayer]] | None:
        """Return the rows that a version may be stored as changes of; None without a base or if its files are damaged."""
        try:
            return None if base is None else self.map_layers(base)
        except CheckpointError:
            return None

    def _locate_manifest(self, number: int) -> Path:
        """Return the path of a manifest."""
        return self.root / "versions" / f"{number:06d}.json"

    @contextmanager
    def _lock_publishing(self) -> Iterator[None]:
        """Exclude other publishers of this host within a context, who would write the same files."""
        with hold_lock_within(self.root / ".publishing", _PUBLISH_WAIT_S, f"publishing to {self.root}"):
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the serving state within a context."""
        with hold_lock_within(self.root / ".lock", _CHANGE_WAIT_S, f"changing the versions of {self.root}"):
            yield
