"""Registry: the versions of a run in a folder, and the one file that says which of them are served.

    versions/000001.json   manifests            blobs/<sha256>   what they name            serving.json   who is served

A publish writes blobs, then its manifest, then, where it may, `serving.json`: a reader finds a version whole or not at all.
Rows that changed are found by comparing with the base, so a publisher need not track them. Publishers exclude each other by a
lock of the folder.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nonet.atomic import make_folder
from nonet.embedding.reading import Layer, MappedRows, whole
from nonet.embedding.tables import TableSpec
from nonet.errors import CheckpointError, ConfigError, StaleVersion
from nonet.workers import one_file
from nonet.workers.registry.blobs import Blobs
from nonet.workers.registry.contents import Contents, put_layer
from nonet.workers.registry.serving import Serving
from nonet.workers.registry.version import DELTA, FULL, Version

_MOST_CHANGED = 0.3  # of all rows: a delta beyond it is written whole
_LONGEST = 16  # layers that a reader looks through, at most


class Registry:
    """Opens a folder; it is made when there is none."""

    def __init__(self, root: Path):
        self.root = root
        self.blobs = Blobs(root / "blobs")
        make_folder(root / "versions")

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Serving:
        """Who is served by what, as the file says at this moment."""
        return Serving.read(self.root / "serving.json")

    def numbers(self) -> list[int]:
        """All versions, ascending."""
        names = (path.stem for path in (self.root / "versions").glob("*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def version(self, number: int) -> Version:
        """A version's manifest. Raises ConfigError where there is none, CheckpointError where it is torn."""
        path = self._manifest(number)
        if not path.exists():
            there = ", ".join(map(str, self.numbers()[-10:])) or "none"
            raise ConfigError(f"{self.root} has no version {number}; the newest: {there}")
        return Version.read(path)

    def line(self, number: int) -> list[Version]:
        """A version and those it was made from, the newest first."""
        versions = [self.version(number)]
        while (base := versions[-1].base) is not None:
            versions.append(self.version(base))
        return versions

    def layers(self, number: int) -> dict[str, list[Layer]]:
        """The rows of a version by table, mapped: the newest full version at or before it, and the deltas after that."""
        needed: list[Version] = []
        at: int | None = number
        while at is not None and not (needed and needed[-1].kind == FULL):
            needed.append(self.version(at))
            at = needed[-1].base
        if needed[-1].kind != FULL:
            raise CheckpointError(f"version {number} starts from no full version")
        layers: dict[str, list[Layer]] = {}
        for version in reversed(needed):
            for table, files in version.rows.items():
                paths = {name: self.blobs.path(blob, f"rows of {table!r}") for name, blob in files.items()}
                layers.setdefault(table, []).append(Layer.map(paths))
        return layers

    def rows(self, number: int, specs: Mapping[str, TableSpec]) -> MappedRows:
        """A reader of a version's rows, where they lie."""
        return MappedRows(number, self.layers(number), specs)

    def files(self, version: Version) -> tuple[Path, dict[str, Path]]:
        """The dense weights of a version and the counts of its memory, checked."""
        counts = {name: self.blobs.path(blob, f"counts ({name})") for name, blob in version.counts.items()}
        return self.blobs.path(version.dense, "dense weights"), counts

    # --- changing ---------------------------------------------------------------------------------------------

    def publish(self, contents: Contents, *, base: int | None = None, serve: bool = True) -> Version:
        """A new version made from `base`; with `serve` it is what everybody is answered by from now on.

        A commit that was published is not published again: the version it has. One whose version was rolled back gets another
        where nobody is answered by it yet (`serve` False): a person asked for it.

        Raises StaleVersion, and leaves no version, where the base was rolled back.
        """
        with self._lock():
            serving = self.serving
            commit = contents.source.get("commit")
            for number in self.numbers() if commit else ():
                again = not serve and number in serving.refused
                if (there := self.version(number)).source.get("commit") == commit and not again:
                    return there
            if base is not None and base in serving.refused:
                raise StaleVersion(
                    f"version {base} was rolled back: what is made from it is refused; publish from {serving.default}"
                )
            number = (self.numbers() or [0])[-1] + 1
            version = self._write(contents, number, base)
            if serve:
                serving.promoted(number, None).write(self.root / "serving.json")
            return version

    def renew(self, number: int, catalogue: str, counts: Mapping[str, Path]) -> Version:
        """A version of the same weights and rows over another catalogue; who was answered by `number` is answered by it.

        A catalogue is published once: later calls give the version it has, served or rolled back.
        """
        with self._lock():
            for there in map(self.version, self.numbers()):
                if there.catalogue == catalogue:
                    return there
            before, written = self.version(number), 0
            names = {}
            for name, path in counts.items():
                names[name], new = self.blobs.put_file(path)
                written += new
            version = Version(
                self.numbers()[-1] + 1,
                number,
                DELTA,
                before.source | {"published": time.time()},
                catalogue,
                before.dense,
                names,
                {},
                written,
            )
            version.write(self._manifest(version.number))
            serving = self.serving
            if number in serving.versions:
                serving.replaced(number, version.number).write(self.root / "serving.json")
            return version

    def promote(self, number: int, share: float | None = None) -> Serving:
        """Answer everybody, or a share of the users, by a version. Raises ConfigError."""
        with self._lock():
            self.version(number)
            serving = self.serving.promoted(number, share)
            serving.write(self.root / "serving.json")
            return serving

    def rollback(self, to: int | None = None) -> Serving:
        """Go back to a version, by default the one that the served one was made from; what lies between is refused, and all
        that is made from it. Raises ConfigError."""
        with self._lock():
            serving = self.serving
            if serving.default is None:
                raise ConfigError(f"{self.root} serves no version: there is nothing to roll back")
            line = self.line(serving.default)
            target = to if to is not None else (line[0].base or None)
            if target is None:
                raise ConfigError(
                    f"version {serving.default} is the first: there is none before it to go back to"
                )
            self.version(target)
            before = {version.number for version in self.line(target)}
            bad = {version.number for version in line} - before
            if not bad:
                bad = {serving.default} - {target}
            for number in self.numbers():  # and what was made from them
                if self._base(number) in bad and number not in before:
                    bad.add(number)
            serving = serving.rolled_back(target, bad)
            serving.write(self.root / "serving.json")
            return serving

    def withdraw(self, items: set[str]) -> Serving:
        """Show these items, by id, to nobody; it replaces what was withdrawn before."""
        with self._lock():
            before = self.serving
            serving = Serving(
                before.default, before.shares, before.refused, tuple(sorted(items)), before.turn + 1
            )
            serving.write(self.root / "serving.json")
            return serving

    def _base(self, number: int) -> int | None:
        try:
            return self.version(number).base
        except CheckpointError:
            return None

    def _write(self, contents: Contents, number: int, base: int | None) -> Version:
        scratch = self.root / ".whole.safetensors"
        dense, written = self.blobs.put_file(one_file(contents.dense, scratch))
        scratch.unlink(missing_ok=True)
        counts = {}
        for name, path in contents.counts.items():
            counts[name], new = self.blobs.put_file(path)
            written += new
        before = {} if base is None else self.layers(base)
        long = max((len(layers) for layers in before.values()), default=0) >= _LONGEST
        changes = {
            table: layer.changes(whole(before[table])) if table in before else layer
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
        version = Version(
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
        version.write(self._manifest(number))
        return version

    def _manifest(self, number: int) -> Path:
        return self.root / "versions" / f"{number:06d}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
