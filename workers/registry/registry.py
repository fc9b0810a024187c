"""Registry: the published versions of a run in a folder, and the file that says which of them are served.

    versions/000001.json   manifests            blobs/<sha256>   their files            serving.json   what is served

A version is published from a complete checkpoint of the run. Publishing writes blobs, then the manifest,
then, if requested, `serving.json`, so a reader finds a version complete or not at all. A version with a base stores only
the rows that changed (a delta); they are found by comparison with the base, so a publisher need not track them. A lock
admits one publisher at a time. A second lock is held only while `serving.json` changes, so that promotions, rollbacks
and withdrawals do not wait for a publisher that writes files.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nonet.atomic import make_folder
from nonet.embedding.reading import MappedReader, RowLayer, merge_layers
from nonet.embedding.tables import TableSpec
from nonet.errors import CheckpointError, ConfigError, StaleVersion
from nonet.workers import merge_shards
from nonet.workers.registry.blobs import BlobStore
from nonet.workers.registry.contents import VersionContents, put_layer
from nonet.workers.registry.serving import ServingState
from nonet.workers.registry.version import DELTA, FULL, Version

_MAX_DELTA_SHARE = 0.3  # Share of all rows; if more have changed, a full version is written.
_MAX_LAYERS = 16  # Maximum number of a full version and its deltas, since a reader searches each of them.


class VersionRegistry:
    """The versions in a folder, which is created if it does not exist."""

    def __init__(self, root: Path):
        self.root = root
        self.blobs = BlobStore(root / "blobs")
        make_folder(root / "versions")

    # --- Reading ----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> ServingState:
        """The serving state that `serving.json` contains now."""
        return ServingState.read(self.root / "serving.json")

    @property
    def announced(self) -> ServingState:
        """The newest known serving state; in a remote registry its versions may not be downloaded to this host yet."""
        return self.serving

    def list_versions(self) -> list[int]:
        """Return the numbers of all versions, ascending."""
        names = (path.stem for path in (self.root / "versions").glob("*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

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

    def list_lineage(self, number: int) -> list[Version]:
        """Return a version and its ancestors, the newest first."""
        versions = [self.read_version(number)]
        while (base := versions[-1].base) is not None:
            versions.append(self.read_version(base))
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
        with self._lock_publishing():
            with self._lock():
                published = self._find_published(commit, serve)
                if published is not None:
                    if serve:
                        self._follow_commit(published, commit)
                    return published
                self._check_base(base)
            number = max(self.list_versions(), default=0) + 1
            version = self._prepare(contents, number, base)
            with self._lock():
                self._check_base(base)  # It may have been rolled back while the files were written.
                version.write(self._locate_manifest(version.number))
                if serve:
                    serving = replace(self.serving.promote(version.number, None), followed=commit)
                    serving.write(self.root / "serving.json")
            return version

    def _find_published(self, commit: str | None, serve: bool) -> Version | None:
        """Return a version of a checkpoint: the default version if it is one, else the newest that was not rolled back.

        If there is neither, return the newest one that was rolled back with `serve`, and None without it.
        """
        serving = self.serving
        published = [
            version
            for version in map(self.read_version, self.list_versions())
            if commit and version.source.get("commit") == commit
        ]
        not_refused = [version for version in published if version.number not in serving.refused]
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
        if (
            followed is None
        ):  # An older Nonet followed every checkpoint except those that an operator requested.
            followed_versions = [
                v for v in map(self.read_version, self.list_versions()) if not v.source.get("asked")
            ]
            followed = followed_versions[-1].source.get("commit") if followed_versions else None
        if followed == commit or version.number in serving.refused:
            return
        if version.number != serving.default:
            serving = serving.promote(version.number, None)
        replace(serving, followed=commit).write(self.root / "serving.json")

    def _check_base(self, base: int | None) -> None:
        """Raise StaleVersion if the base version was rolled back."""
        serving = self.serving
        if base is not None and base in serving.refused:
            raise StaleVersion(
                f"version {base} was rolled back, so no version can be based on it; use version {serving.default} as the base"
            )

    def renew(self, number: int, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """Publish the weights and rows of a version with another catalogue, and serve the new version in place of the old one.

        A catalogue is published once: later calls return its version, even if that version was rolled back.

        Args:
            number: The version whose weights and rows are used.
            catalogue: Version of the catalogue's trie.
            counts: Files of the transition counts by name.

        Returns:
            The version with that catalogue.
        """
        with self._lock_publishing(), self._lock():
            for version in map(self.read_version, self.list_versions()):
                if version.catalogue == catalogue:
                    return version
            old, written_bytes = self.read_version(number), 0
            count_blobs = {}
            for name, path in counts.items():
                count_blobs[name], new_bytes = self.blobs.put_file(path)
                written_bytes += new_bytes
            version = Version(
                number=self.list_versions()[-1] + 1,
                base=number,
                kind=DELTA,
                source=old.source | {"published": time.time()},
                catalogue=catalogue,
                dense=old.dense,
                counts=count_blobs,
                rows={},
                written=written_bytes,
            )
            version.write(self._locate_manifest(version.number))
            serving = self.serving
            if number in serving.versions:
                serving.replace_version(number, version.number).write(self.root / "serving.json")
            return version

    def promote(self, number: int, share: float | None = None) -> ServingState:
        """Serve a version to all users or to a share of them.

        Args:
            number: The version.
            share: Share of the users in (0, 1), None for all.

        Returns:
            The new serving state.

        Raises:
            ConfigError: There is no such version, it was rolled back, or the share is out of range.
        """
        with self._lock():
            self.read_version(number)
            serving = self.serving.promote(number, share)
            serving.write(self.root / "serving.json")
            return serving

    def rollback(self, to: int | None = None) -> ServingState:
        """Serve an earlier version again, and refuse the versions that it replaces.

        A refused version cannot be promoted again, and neither can versions that are based on it. Without `to`,
        versions that have a share are refused, and the default version stays. If no version has a share, the default
        version is refused and its newest ancestor that was not refused before is served. With `to`, the default
        version, its ancestors and every version that has a share are refused, except `to` and the ancestors of `to`.

        Args:
            to: The version to serve.

        Returns:
            The new serving state.

        Raises:
            ConfigError: No version is served, or the default version has no ancestor that was not refused.
        """
        with self._lock():
            serving = self.serving
            if serving.default is None:
                raise ConfigError("the run serves no version, so there is nothing to roll back")
            lineage = {version.number for version in self.list_lineage(serving.default)}
            if to is None and serving.shares:
                target, accepted, refused = serving.default, lineage, set(serving.shares)
            else:
                target = to if to is not None else self._find_rollback_target(serving)
                accepted = {version.number for version in self.list_lineage(target)}
                refused = (lineage | set(serving.shares)) - accepted
            for number in self.list_versions():  # In ascending order, since a base has a lower number.
                if self._read_base(number) in refused and number not in accepted:
                    refused.add(number)
            serving = serving.roll_back(target, refused)
            serving.write(self.root / "serving.json")
            return serving

    def _find_rollback_target(self, serving: ServingState) -> int:
        """Return the newest ancestor of the default version that was not rolled back.

        Raises:
            ConfigError: There is no such ancestor.
        """
        assert serving.default is not None
        for version in self.list_lineage(serving.default)[1:]:
            if version.number not in serving.refused:
                return version.number
        raise ConfigError(
            f"version {serving.default} cannot be rolled back: it has no ancestor that was not rolled back"
        )

    def withdraw(self, items: set[str]) -> ServingState:
        """Exclude items, given by id, from all recommendations, instead of the items that were withdrawn before.

        Returns:
            The new serving state.
        """
        with self._lock():
            old = self.serving
            serving = replace(old, withdrawn=tuple(sorted(items)), turn=old.turn + 1)
            serving.write(self.root / "serving.json")
            return serving

    def _read_base(self, number: int) -> int | None:
        """Return the number of a version's base, None if it has none or its manifest is damaged."""
        try:
            return self.read_version(number).base
        except CheckpointError:
            return None

    def _prepare(self, contents: VersionContents, number: int, base: int | None) -> Version:
        """Write the files of a version, and return its manifest; readers ignore the files until the manifest is written."""
        merged_file = self.root / ".whole.safetensors"
        dense, written_bytes = self.blobs.put_file(merge_shards(contents.dense, merged_file))
        merged_file.unlink(missing_ok=True)
        counts = {}
        for name, path in contents.counts.items():
            counts[name], new_bytes = self.blobs.put_file(path)
            written_bytes += new_bytes
        base_layers = {} if base is None else self.map_layers(base)
        has_max_layers = max((len(layers) for layers in base_layers.values()), default=0) >= _MAX_LAYERS
        changes = {
            table: layer.diff(merge_layers(base_layers[table])) if table in base_layers else layer
            for table, layer in contents.rows.items()
        }
        total_rows = sum(len(layer.key) for layer in contents.rows.values())
        changed_rows = sum(len(layer.key) + len(layer.gone) for layer in changes.values())
        is_full = base is None or has_max_layers or changed_rows > _MAX_DELTA_SHARE * max(1, total_rows)
        row_blobs = {}
        layers = contents.rows if is_full else changes
        for table, layer in layers.items():
            row_blobs[table], new_bytes = put_layer(self.blobs.put_array, layer)
            written_bytes += new_bytes
        return Version(
            number=number,
            base=base,
            kind=FULL if is_full else DELTA,
            source=contents.source | {"published": time.time()},
            catalogue=contents.catalogue,
            dense=dense,
            counts=counts,
            rows=row_blobs,
            written=written_bytes,
            touched={table: len(layer.key) for table, layer in layers.items()},
        )

    def _locate_manifest(self, number: int) -> Path:
        """Return the path of a manifest."""
        return self.root / "versions" / f"{number:06d}.json"

    @contextmanager
    def _lock_publishing(self) -> Iterator[None]:
        """Exclude other publishers within a context, since two at once would give their versions the same number."""
        with (self.root / ".publishing").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the serving state within a context."""
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
