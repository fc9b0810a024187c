"""Registry: the versions of a run in a folder, and the one file that says which of them are served.

    versions/000001.json   manifests            blobs/<sha256>   their files            serving.json   what is served

Publishing writes blobs, then the manifest, then, if requested, `serving.json`, so a reader finds a version complete
or not at all. Changed rows are found by comparison with the base, so a publisher need not track them. Publishers
exclude each other by a lock of the folder. A second lock is held only while `serving.json` changes, so that
promotions, rollbacks and withdrawals do not wait for a publisher that writes files.
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

_MOST_CHANGED = 0.3  # of all rows: a delta beyond it is written whole
_LONGEST = 16  # layers that a reader looks through, at most


class VersionRegistry:
    """The versions in a folder, which is created if it does not exist."""

    def __init__(self, root: Path):
        self.root = root
        self.blobs = BlobStore(root / "blobs")
        make_folder(root / "versions")

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> ServingState:
        """The serving state, as the file says at this moment."""
        return ServingState.read(self.root / "serving.json")

    @property
    def announced(self) -> ServingState:
        """The serving state to come, although files of its versions may still be on their way to this host."""
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
            there = ", ".join(map(str, self.list_versions()[-10:])) or "none"
            raise ConfigError(f"{self.root} has no version {number}; the newest: {there}")
        return Version.read(path)

    def list_lineage(self, number: int) -> list[Version]:
        """Return a version and its ancestors, the newest first."""
        versions = [self.read_version(number)]
        while (base := versions[-1].base) is not None:
            versions.append(self.read_version(base))
        return versions

    def map_layers(self, number: int) -> dict[str, list[RowLayer]]:
        """Map the rows of a version by table: the newest full version up to it, and the deltas since."""
        needed: list[Version] = []
        at: int | None = number
        while at is not None and not (needed and needed[-1].kind == FULL):
            needed.append(self.read_version(at))
            at = needed[-1].base
        if needed[-1].kind != FULL:
            raise CheckpointError(f"version {number} starts from no full version")
        layers: dict[str, list[RowLayer]] = {}
        for version in reversed(needed):
            for table, files in version.rows.items():
                paths = {name: self.blobs.locate(blob, f"rows of {table!r}") for name, blob in files.items()}
                layers.setdefault(table, []).append(RowLayer.map_files(paths))
        return layers

    def open_rows(self, number: int, specs: Mapping[str, TableSpec]) -> MappedReader:
        """Return a reader of the memory-mapped rows of a version."""
        return MappedReader(number, self.map_layers(number), specs)

    def locate_files(self, version: Version) -> tuple[Path, dict[str, Path]]:
        """Return the files of a version's dense weights and transition counts, after checking them."""
        counts = {name: self.blobs.locate(blob, f"counts ({name})") for name, blob in version.counts.items()}
        return self.blobs.locate(version.dense, "dense weights"), counts

    # --- changing ---------------------------------------------------------------------------------------------

    def publish(self, contents: VersionContents, *, base: int | None = None, serve: bool = True) -> Version:
        """Publish a new version.

        A commit that was published before keeps its version. With `serve` that version is promoted, unless it was
        rolled back or the commit is the one that was followed last; in these cases a person chose what is served. A
        commit whose version was rolled back gets a new version if it is not served yet (`serve` is False), since a
        person requested it.

        Args:
            contents: The content of the version.
            base: The version that it is made from, None for none.
            serve: Whether it becomes the default version.

        Raises:
            StaleVersion: The base was rolled back; no version is left.
        """
        commit = contents.source.get("commit")
        with self._lock_publishing():
            with self._lock():
                there = self._find_published(commit, serve)
                if there is not None:
                    if serve:
                        self._follow_commit(there, commit)
                    return there
                self._check_base(base)
            version = self._prepare(contents, (self.list_versions() or [0])[-1] + 1, base)
            with self._lock():
                self._check_base(base)  # it may have been rolled back while the files were written
                version.write(self._locate_manifest(version.number))
                if serve:
                    serving = replace(self.serving.promote(version.number, None), followed=commit)
                    serving.write(self.root / "serving.json")
            return version

    def _find_published(self, commit: str | None, serve: bool) -> Version | None:
        """Return the version of a commit: the one that is served, else the newest that was not rolled back, else any."""
        serving = self.serving
        there = [
            each
            for each in map(self.read_version, self.list_versions())
            if commit and each.source.get("commit") == commit
        ]
        good = [each for each in there if each.number not in serving.refused]
        served = [each for each in good if each.number == serving.default]
        for each in (served, good, there if serve else []):
            if each:
                return each[-1]
        return None

    def _follow_commit(self, version: Version, commit: str | None) -> None:
        """Promote the version of a commit that the run selected after it was published, unless it was rolled back."""
        serving = self.serving
        followed = serving.followed
        if followed is None:  # written by an older Nonet, which followed every commit
            own = [
                each for each in map(self.read_version, self.list_versions()) if not each.source.get("asked")
            ]
            followed = own[-1].source.get("commit") if own else None
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
                f"version {base} was rolled back: what is made from it is refused; publish from {serving.default}"
            )

    def renew(self, number: int, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """Publish a version of the same weights and rows over another catalogue, and serve it in place of the old one.

        A catalogue is published once: later calls return its version, whether it is served or was rolled back.

        Args:
            number: The version whose weights and rows are used.
            catalogue: Version of the trie.
            counts: Files of the transition counts by name.
        """
        with self._lock_publishing(), self._lock():
            for there in map(self.read_version, self.list_versions()):
                if there.catalogue == catalogue:
                    return there
            before, written = self.read_version(number), 0
            names = {}
            for name, path in counts.items():
                names[name], new = self.blobs.put_file(path)
                written += new
            version = Version(
                self.list_versions()[-1] + 1,
                number,
                DELTA,
                before.source | {"published": time.time()},
                catalogue,
                before.dense,
                names,
                {},
                written,
            )
            version.write(self._locate_manifest(version.number))
            serving = self.serving
            if number in serving.versions:
                serving.replace_version(number, version.number).write(self.root / "serving.json")
            return version

    def promote(self, number: int, share: float | None = None) -> ServingState:
        """Serve all users, or a share of them, by a version.

        Args:
            number: The version.
            share: Share of the users in (0, 1), None for all.

        Raises:
            ConfigError: There is no such version, it was rolled back, or the share is out of range.
        """
        with self._lock():
            self.read_version(number)
            serving = self.serving.promote(number, share)
            serving.write(self.root / "serving.json")
            return serving

    def rollback(self, to: int | None = None) -> ServingState:
        """Go back to a version. Refused versions may not be promoted again, nor may versions that are made from them.

        Without `to`, versions that have a share are refused first, and the default stays. If no share is open, the
        default version and those between it and its newest valid ancestor are refused, and that ancestor is served.
        With `to`, every version that is served or has a share is refused, unless it is `to` or an ancestor of `to`.

        Args:
            to: The version to go back to.

        Raises:
            ConfigError: No version is served, or there is none to go back to.
        """
        with self._lock():
            serving = self.serving
            if serving.default is None:
                raise ConfigError(f"{self.root} serves no version: there is nothing to roll back")
            line = {version.number for version in self.list_lineage(serving.default)}
            if to is None and serving.shares:
                target, kept, bad = serving.default, line, set(serving.shares)
            else:
                target = to if to is not None else self._find_rollback_target(serving)
                kept = {version.number for version in self.list_lineage(target)}
                bad = (line | set(serving.shares)) - kept
            for number in self.list_versions():  # ascending: a version is made from an earlier one
                if self._read_base(number) in bad and number not in kept:
                    bad.add(number)
            serving = serving.roll_back(target, bad)
            serving.write(self.root / "serving.json")
            return serving

    def _find_rollback_target(self, serving: ServingState) -> int:
        """Return the newest ancestor of the default version that was not rolled back.

        Raises:
            ConfigError: There is none.
        """
        assert serving.default is not None
        for version in self.list_lineage(serving.default)[1:]:
            if version.number not in serving.refused:
                return version.number
        raise ConfigError(f"version {serving.default} is the first: there is none before it to go back to")

    def withdraw(self, items: set[str]) -> ServingState:
        """Withdraw items, by id, from all answers; replaces the items that were withdrawn before."""
        with self._lock():
            before = self.serving
            serving = replace(before, withdrawn=tuple(sorted(items)), turn=before.turn + 1)
            serving.write(self.root / "serving.json")
            return serving

    def _read_base(self, number: int) -> int | None:
        """Return the base of a version, None if its manifest is damaged."""
        try:
            return self.read_version(number).base
        except CheckpointError:
            return None

    def _prepare(self, contents: VersionContents, number: int, base: int | None) -> Version:
        """Write the files of a version, which are not read before its manifest exists."""
        scratch = self.root / ".whole.safetensors"
        dense, written = self.blobs.put_file(merge_shards(contents.dense, scratch))
        scratch.unlink(missing_ok=True)
        counts = {}
        for name, path in contents.counts.items():
            counts[name], new = self.blobs.put_file(path)
            written += new
        before = {} if base is None else self.map_layers(base)
        long = max((len(layers) for layers in before.values()), default=0) >= _LONGEST
        changes = {
            table: layer.diff(merge_layers(before[table])) if table in before else layer
            for table, layer in contents.rows.items()
        }
        total = sum(len(layer.key) for layer in contents.rows.values())
        changed = sum(len(layer.key) + len(layer.gone) for layer in changes.values())
        full = base is None or long or changed > _MOST_CHANGED * max(1, total)
        rows = {}
        chosen = contents.rows if full else changes
        for table, layer in chosen.items():
            rows[table], new = put_layer(self.blobs.put_array, layer)
            written += new
        return Version(
            number,
            base,
            FULL if full else DELTA,
            contents.source | {"published": time.time()},
            contents.catalogue,
            dense,
            counts,
            rows,
            written,
            {table: len(layer.key) for table, layer in chosen.items()},
        )

    def _locate_manifest(self, number: int) -> Path:
        """Return the path of a manifest."""
        return self.root / "versions" / f"{number:06d}.json"

    @contextmanager
    def _lock_publishing(self) -> Iterator[None]:
        """Exclude other publishers, since a publisher numbers its version."""
        with (self.root / ".publishing").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the serving state."""
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
