"""A registry on any Arrow filesystem (s3://, gs://, hdfs://, file://), with a local folder as its copy.

The address is where the registry is. Its files are downloaded into the local folder, where rows are memory-mapped as in
a local registry, and changes in the local folder are pushed to the address. Blobs are downloaded first, checked by
their names, then manifests, then `serving.json`; they are pushed in the same order, so no reader sees half a version.
Object stores have no locks: publishers on several hosts do not exclude each other, as those of one host do. The local
folder can be rebuilt: a host that lost it downloads the served versions and the versions that these are made from.
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

from nonet.addresses import open_filesystem
from nonet.atomic import replace_file, write_whole
from nonet.errors import CheckpointError, ConfigError
from nonet.workers.registry.contents import VersionContents
from nonet.workers.registry.registry import VersionRegistry
from nonet.workers.registry.serving import ServingState
from nonet.workers.registry.version import FULL, Version

_MAX_AGE_S = 1.0  # Default of `max_age_s`: servers see a change after about a second.
_SERVING = "serving.json"


class RemoteRegistry(VersionRegistry):
    """A registry at an address.

    Args:
        local_dir: The local folder.
        uri: The address, or a path on `filesystem`.
        filesystem: The filesystem to use instead of the one of the address.
        max_age_s: Seconds after which the files at the address are read again.

    Raises:
        ConfigError: The address has no filesystem.
    """

    def __init__(
        self,
        local_dir: Path,
        uri: str,
        filesystem: pafs.FileSystem | None = None,
        max_age_s: float = _MAX_AGE_S,
    ):
        super().__init__(local_dir)
        self.uri, self._max_age_s = uri, max_age_s
        try:
            self._fs, self._path = (filesystem, uri) if filesystem is not None else open_filesystem(uri)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"registry: {uri!r} is not the address of a filesystem: {_format_error(error)}"
            ) from None
        self._refreshed_at, self._changing = -float("inf"), False
        self._announced: tuple[float, ServingState] | None = None  # When it was read, and the state.
        self._refresh_lock = threading.RLock()

    @property
    def serving(self) -> ServingState:
        """The serving state, at most `max_age_s` old. Raises CheckpointError if the address does not answer."""
        self._refresh()
        return super().serving

    @property
    def announced(self) -> ServingState:
        """The serving state at the address, read without waiting for files that are being downloaded."""
        now = time.monotonic()
        if self._announced is None or now - self._announced[0] >= self._max_age_s:
            text = self._read_remote(_SERVING)
            serving = ServingState() if text is None else ServingState.parse(text, f"{self.uri}/{_SERVING}")
            self._announced = now, serving
        return self._announced[1]

    def list_versions(self) -> list[int]:
        """Return the numbers of all versions at the address, ascending."""
        self._refresh()
        return super().list_versions()

    def read_version(self, number: int) -> Version:
        """Download the files of a version, and return its manifest. Raises as `VersionRegistry.read_version`."""
        self._refresh()
        if number in self._list_remote() and not self._has_files(number):
            self._download(number)
        return super().read_version(number)

    def push(self) -> None:
        """Push what the address lacks; the serving state of the address, if it has one, is kept.

        Raises:
            ConfigError: The address has other versions of the same numbers, which belong to another run.
        """
        for number in self._list_remote():
            manifest = self._locate_manifest(number)
            if manifest.exists() and manifest.read_bytes() != self._read_remote(_name_manifest(number)):
                raise ConfigError(
                    f"registry: {self.uri} has another version {number} than {self.root}; give each run an address of its own"
                )
        with self._lock():  # Leaving the context pushes the changes.
            pass

    def _refresh(self, now: bool = False, download_files: bool = True) -> None:
        """Download new manifests, and the serving state if it has changed.

        Args:
            now: Whether to read the address even if it was read less than `max_age_s` ago.
            download_files: Whether the files of the served versions are downloaded before the state is replaced.
        """
        with self._refresh_lock:
            is_recent = time.monotonic() - self._refreshed_at < self._max_age_s
            if self._changing or (is_recent and not now):
                return
            text = self._read_remote(_SERVING)
            self._refreshed_at = time.monotonic()
            path = self.root / _SERVING
            for number in self._list_remote():
                if not self._locate_manifest(number).exists():
                    write_whole(
                        self._locate_manifest(number), self._read_remote(_name_manifest(number)) or b""
                    )
            if text is None or (path.exists() and path.read_bytes() == text):
                return
            draft = self.root / "serving.taken.json"
            write_whole(draft, text)
            for number in ServingState.read(draft).versions if download_files else ():
                self._download(number)
            draft.replace(path)

    def _download(self, number: int) -> None:
        """Download the files of a version and of those that its rows are made from.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for version in self._list_needed(number):
            for name in version.blobs:
                path = self.blobs.root / name
                if path.exists():
                    continue
                content = self._read_remote(f"blobs/{name}")
                if content is None or hashlib.sha256(content).hexdigest() != name:
                    raise CheckpointError(
                        f"{self.uri}/blobs/{name} of version {version.number} is damaged or missing"
                    )
                with replace_file(path) as draft:
                    draft.write_bytes(content)

    def _has_files(self, number: int) -> bool:
        """Return whether all files of a version are in the local folder."""
        try:
            needed = self._list_needed(number)
        except (CheckpointError, ConfigError):
            return False
        return all((self.blobs.root / name).exists() for version in needed for name in version.blobs)

    def _list_needed(self, number: int) -> list[Version]:
        """Return a version and its ancestors up to a full one, the newest first."""
        versions = [super().read_version(number)]
        while versions[-1].kind != FULL and versions[-1].base is not None:
            versions.append(super().read_version(versions[-1].base))
        return versions

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the serving state within a context, then push the changes; undo them if that fails."""
        with super()._lock(), self._refresh_lock:
            self._refresh(
                now=True, download_files=False
            )  # Changing the serving state does not wait for downloads.
            self._changing = True
            old_serving = VersionRegistry.serving.fget(self)  # pyright: ignore[reportOptionalCall]
            old_numbers = set(super().list_versions())
            try:
                yield
                self._push_changes()
            except BaseException:
                for number in set(super().list_versions()) - old_numbers:
                    self._locate_manifest(number).unlink()
                old_serving.write(self.root / _SERVING)
                raise
            finally:
                self._changing = False
                self._refreshed_at, self._announced = -float("inf"), None

    def _prepare(self, contents: VersionContents, number: int, base: int | None) -> Version:
        """Write the files of a version and push them, so that the lock is not held during the upload."""
        self._refresh(now=True)
        version = super()._prepare(contents, number, base)
        self._push_files(version)
        return version

    def _push_files(self, version: Version) -> None:
        """Push the blobs of a version that the address lacks."""
        for name in version.blobs:
            if not self._has_remote(f"blobs/{name}"):
                self._write_remote(f"blobs/{name}", (self.blobs.root / name).read_bytes())

    def _push_changes(self) -> None:
        """Push the versions that the address lacks, then the serving state."""
        remote_numbers = set(self._list_remote())
        for number in super().list_versions():
            if number in remote_numbers:
                continue
            self._push_files(super().read_version(number))
            self._write_remote(_name_manifest(number), self._locate_manifest(number).read_bytes())
        if (self.root / _SERVING).exists():
            self._write_remote(_SERVING, (self.root / _SERVING).read_bytes())

    # --- The filesystem ---------------------------------------------------------------------------------------

    def _list_remote(self) -> list[int]:
        """Return the numbers of the versions at the address, ascending."""
        selector = pafs.FileSelector(self._join_path("versions"), allow_not_found=True)
        with self._convert_errors():
            stems = [info.base_name.removesuffix(".json") for info in self._fs.get_file_info(selector)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _has_remote(self, name: str) -> bool:
        """Return whether a file exists at the address."""
        with self._convert_errors():
            return self._fs.get_file_info(self._join_path(name)).type == pafs.FileType.File

    def _read_remote(self, name: str) -> bytes | None:
        """Read a file at the address, None if it does not exist."""
        if not self._has_remote(name):
            return None
        with self._convert_errors(), self._fs.open_input_stream(self._join_path(name)) as file:
            return file.read()

    def _write_remote(self, name: str, content: bytes) -> None:
        """Write a file at the address atomically."""
        path = self._join_path(name)
        with self._convert_errors():
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(f"{path}.part") as file:
                file.write(content)
            self._fs.move(f"{path}.part", path)

    def _join_path(self, name: str) -> str:
        """Return the path on the filesystem of a file, given by its name relative to the address."""
        return f"{self._path.rstrip('/')}/{name}"

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of the filesystem to CheckpointError within a context."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise CheckpointError(f"registry {self.uri} does not answer: {_format_error(error)}") from None


def open_registry(folder: Path, address: str | None = None) -> VersionRegistry:
    """Open the registry of a run's serving folder.

    Args:
        folder: RUN/serving.
        address: Address of the registry; None for the address that was used there last, or else the folder itself;
            "" for the folder itself. The content of the folder is pushed to an address that differs from the last one.

    Raises:
        ConfigError: The address has no filesystem.
        CheckpointError: A new address does not answer.
    """
    address_file = folder / "registry.uri"
    last_address = address_file.read_text(encoding="utf-8").strip() if address_file.exists() else ""
    address = last_address if address is None else address
    if not address:
        return VersionRegistry(folder / "registry")
    registry = RemoteRegistry(folder / "registry", address)
    if address != last_address:
        registry.push()
        write_whole(address_file, address.encode())
    return registry


def _name_manifest(number: int) -> str:
    """Return the name of a version's manifest, relative to the address."""
    return f"versions/{number:06d}.json"


def _format_error(error: Exception) -> str:
    """Format an error as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]
