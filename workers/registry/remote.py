"""A registry on any filesystem of Arrow (s3://, gs://, hdfs://, file://): a folder here that follows it, and is pushed to it.

What is read lies here, so rows are mapped as of a local registry. A follower takes blobs first, checked by their names, then
manifests, then `serving.json`; a publisher pushes in the same order. So nobody sees half a version. Object stores have no locks:
publishers on several hosts are not kept apart, as those of one host are. What is here and not there is of no worth: a host that
lost its folder takes what is served, and the versions that it is made of.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from nonet.atomic import replacing, write_whole
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.registry.contents import Contents
from nonet.workers.registry.registry import Registry
from nonet.workers.registry.serving import Serving
from nonet.workers.registry.version import FULL, Version

_LOOK_S = 1.0
_SERVING = "serving.json"


class RemoteRegistry(Registry):
    """A registry at an address. here: the folder that follows it; filesystem, base: in place of an address; look_s: how old what
    is known of it may be. Raises ConfigError for an address that no filesystem is behind."""

    def __init__(
        self, here: Path, uri: str, filesystem: pafs.FileSystem | None = None, look_s: float = _LOOK_S
    ):
        super().__init__(here)
        self.uri, self._look_s = uri, look_s
        try:
            self._fs, self._path = (
                (filesystem, uri) if filesystem is not None else pafs.FileSystem.from_uri(uri)
            )
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"registry: {uri!r} is no address of a filesystem: {_line(error)}") from None
        self._looked, self._changing = -float("inf"), False
        self._announced: tuple[float, Serving] | None = None
        self._following = threading.RLock()

    @property
    def serving(self) -> Serving:
        """Who is served by what, as the address said `look_s` ago at most. Raises CheckpointError where it does not answer."""
        self._follow()
        return super().serving

    @property
    def announced(self) -> Serving:
        """Return who is to be served by what, as the address says now: read without waiting for files that are being taken."""
        now = time.monotonic()
        if self._announced is None or now - self._announced[0] >= self._look_s:
            text = self._read(_SERVING)
            serving = Serving() if text is None else Serving.parse(text, f"{self.uri}/{_SERVING}")
            self._announced = now, serving
        return self._announced[1]

    def numbers(self) -> list[int]:
        """All versions there, ascending."""
        self._follow()
        return super().numbers()

    def version(self, number: int) -> Version:
        """A version's manifest; its files are taken here with it. Raises as `Registry.version`."""
        self._follow()
        if number in self._there() and not self._whole(number):
            self._take(number)
        return super().version(number)

    def push(self) -> None:
        """Push what this folder has and the address has not; who is served is what the address says, where it says so.

        Raises:
            ConfigError: The address has other versions of the same numbers: those of another run.
        """
        for number in self._there():
            own = self._manifest(number)
            if own.exists() and own.read_bytes() != self._read(f"versions/{number:06d}.json"):
                raise ConfigError(
                    f"registry: {self.uri} has another version {number} than {self.root}; give each run an address of its own"
                )
        with self._lock():
            pass

    def _follow(self, now: bool = False, take: bool = True) -> None:
        """Read who is served there, where it has changed; with `take` the files of those versions are here before it counts."""
        with self._following:
            if self._changing or (not now and time.monotonic() - self._looked < self._look_s):
                return
            text = self._read(_SERVING)
            self._looked = time.monotonic()
            path = self.root / _SERVING
            for number in self._there():
                if not self._manifest(number).exists():
                    write_whole(self._manifest(number), self._read(f"versions/{number:06d}.json") or b"")
            if text is None or (path.exists() and path.read_bytes() == text):
                return
            draft = self.root / "serving.taken.json"
            write_whole(draft, text)
            for number in Serving.read(draft).versions if take else ():
                self._take(number)
            draft.replace(path)

    def _take(self, number: int) -> None:
        """The files of a version and of those that its rows are made of. Raises CheckpointError for a file with other bytes."""
        for version in self._needed(number):
            for name in version.blobs:
                path = self.blobs.root / name
                if path.exists():
                    continue
                content = self._read(f"blobs/{name}")
                if content is None or hashlib.sha256(content).hexdigest() != name:
                    raise CheckpointError(
                        f"{self.uri}/blobs/{name} of version {version.number} is torn or missing"
                    )
                with replacing(path) as aside:
                    aside.write_bytes(content)

    def _whole(self, number: int) -> bool:
        try:
            needed = self._needed(number)
        except (CheckpointError, ConfigError):
            return False
        return all((self.blobs.root / name).exists() for version in needed for name in version.blobs)

    def _needed(self, number: int) -> list[Version]:
        """A version, and those before it down to a full one."""
        needed = [super().version(number)]
        while needed[-1].kind != FULL and needed[-1].base is not None:
            needed.append(super().version(needed[-1].base))
        return needed

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Changes are made here and pushed when they are done; one that could not be pushed is undone here."""
        with super()._lock(), self._following:
            self._follow(now=True, take=False)  # nobody waits for files to change who is served
            self._changing = True
            serving, before = Registry.serving.fget(self), set(super().numbers())  # pyright: ignore[reportOptionalCall]
            try:
                yield
                self._push()
            except BaseException:
                for number in set(super().numbers()) - before:
                    self._manifest(number).unlink()
                serving.write(self.root / _SERVING)
                raise
            finally:
                self._changing = False
                self._looked, self._announced = -float("inf"), None

    def _prepare(self, contents: Contents, number: int, base: int | None) -> Version:
        """As of a folder; the files are at the address too, so that the lock is not held while they travel."""
        self._follow(now=True)
        version = super()._prepare(contents, number, base)
        self._push_files(version)
        return version

    def _push_files(self, version: Version) -> None:
        for name in version.blobs:
            if not self._is_there(f"blobs/{name}"):
                self._write_there(f"blobs/{name}", (self.blobs.root / name).read_bytes())

    def _push(self) -> None:
        there = set(self._there())
        for number in super().numbers():
            if number in there:
                continue
            self._push_files(super().version(number))
            self._write_there(f"versions/{number:06d}.json", self._manifest(number).read_bytes())
        if (self.root / _SERVING).exists():
            self._write_there(_SERVING, (self.root / _SERVING).read_bytes())

    # --- the filesystem ---------------------------------------------------------------------------------------

    def _there(self) -> list[int]:
        selector = pafs.FileSelector(self._place("versions"), allow_not_found=True)
        with self._errors():
            stems = [info.base_name.removesuffix(".json") for info in self._fs.get_file_info(selector)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _is_there(self, name: str) -> bool:
        with self._errors():
            return self._fs.get_file_info(self._place(name)).type == pafs.FileType.File

    def _read(self, name: str) -> bytes | None:
        """A file there; None where there is none."""
        if not self._is_there(name):
            return None
        with self._errors(), self._fs.open_input_stream(self._place(name)) as file:
            return file.read()

    def _write_there(self, name: str, content: bytes) -> None:
        """A file there, whole or not at all."""
        place = self._place(name)
        with self._errors():
            self._fs.create_dir(place.rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(f"{place}.part") as file:
                file.write(content)
            self._fs.move(f"{place}.part", place)

    def _place(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise CheckpointError(f"registry {self.uri} does not answer: {_line(error)}") from None


def registry_beside(folder: Path, address: str | None = None) -> Registry:
    """Open the registry of a run's folder of serving.

    Args:
        folder: RUN/serving.
        address: Where the versions are; None for the address that was named there last, or else the folder itself. What the
            folder has is pushed to an address that is named for the first time.

    Raises:
        ConfigError: No filesystem is behind the address.
        CheckpointError: A new address does not answer.
    """
    note = folder / "registry.uri"
    before = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    at = before if address is None else address
    if not at:
        return Registry(folder / "registry")
    registry = RemoteRegistry(folder / "registry", at)
    if at != before:
        registry.push()
        write_whole(note, at.encode())
    return registry


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
