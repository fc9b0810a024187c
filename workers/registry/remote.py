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

from nonet.atomic import make_folder, replacing, write_whole
from nonet.errors import CheckpointError, ConfigError
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
        self._following = threading.RLock()

    @property
    def serving(self) -> Serving:
        """Who is served by what, as the address said `look_s` ago at most. Raises CheckpointError where it does not answer."""
        self._follow()
        return super().serving

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

    def _follow(self, now: bool = False) -> None:
        """Take what is served there, where it has changed."""
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
            for number in Serving.read(draft).versions:
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
            self._follow(now=True)
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
                self._looked = -float("inf")

    def _push(self) -> None:
        there = set(self._there())
        for number in super().numbers():
            if number in there:
                continue
            for name in super().version(number).blobs:
                if not self._is_there(f"blobs/{name}"):
                    self._write_there(f"blobs/{name}", (self.blobs.root / name).read_bytes())
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


def registry_beside(folder: Path, uri: str | None = None) -> Registry:
    """The registry of a run's folder of serving: at the address that was named there last, if any; `uri` names one."""
    note = folder / "registry.uri"
    if uri is not None:
        make_folder(folder)
        write_whole(note, uri.encode())
    at = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    return RemoteRegistry(folder / "registry", at) if at else Registry(folder / "registry")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
