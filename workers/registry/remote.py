"""A registry on any Arrow filesystem (s3://, gs://, hdfs://, file://), with a local folder as its copy.

The address is where the registry is. Its files are downloaded into the local folder, where rows are memory-mapped as in
a local registry. A change is written to the address first: blobs, then the manifest of a new version, then `serving.json`, so
no reader sees half a version. Manifests and `serving.json` are written under the condition that no other host was first
(`conditional`); otherwise the change is made again from what that host has written. If the answer to a write is lost, the address
is read: it says whether the change was made. The local folder can be rebuilt: a host that lost it downloads the files of served
versions, and those of others when they are used.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from nonet.addresses import find_password, open_filesystem
from nonet.atomic import read_content, replace_file, write_whole
from nonet.errors import CheckpointError, ConfigError, StorageConflict, StorageError
from nonet.run_code import read_registry_address
from nonet.trust import approve_registry, check_registry
from nonet.workers.registry.blobs import BlobStore
from nonet.workers.registry.conditional import ConditionalFiles, open_conditional_files
from nonet.workers.registry.contents import VersionContents
from nonet.workers.registry.owner import OWNER, check_owner, encode_owner
from nonet.workers.registry.registry import NUMBER, SERVING, VersionRegistry
from nonet.workers.registry.serving import ServingState
from nonet.workers.registry.version import FULL, Version

_MAX_AGE_S = 1.0  # Default of `max_age_s`: servers see a change after about a second.
_MAX_ATTEMPTS = 20  # at a change, while other hosts make theirs
_MAX_CONTENT_BYTES = 16 << 20  # of a manifest or a state, far more than any has
_PART_BYTES = 1 << 20
_Result = TypeVar("_Result")


class _FetchedBlobs(BlobStore):
    """Blobs that are downloaded when they are located first, or if the local one is damaged.

    Args:
        root: The local folder.
        fetch: Downloads a blob, given its name and what it contains.
    """

    def __init__(self, root: Path, fetch: Callable[[str, str], None]):
        super().__init__(root)
        self._fetch = fetch

    def locate(self, name: str, description: str = "a file") -> Path:
        """Return the path of a blob after downloading and checking it; see `BlobStore.locate`."""
        if name not in self._checked and not self._is_intact(name):
            self._fetch(name, description)
        return super().locate(name, description)


class RemoteRegistry(VersionRegistry):
    """A registry at an address.

    Args:
        local_dir: The local folder.
        uri: The address, or a path on `filesystem`.
        filesystem: The filesystem to use instead of the one of the address.
        max_age_s: Seconds after which the files at the address are read again.
        owner: The run whose versions they are, as for `VersionRegistry`.

    Raises:
        ConfigError: The address has no filesystem or a password, or the folder has the versions of another run.
    """

    def __init__(
        self,
        local_dir: Path,
        uri: str,
        filesystem: pafs.FileSystem | None = None,
        max_age_s: float = _MAX_AGE_S,
        owner: Mapping[str, str] | None = None,
    ):
        super().__init__(local_dir, owner)
        self.blobs = _FetchedBlobs(local_dir / "blobs", self._fetch_blob)
        self.uri, self._max_age_s = uri, max_age_s
        try:
            self._fs, self._path = (filesystem, uri) if filesystem is not None else open_filesystem(uri)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"registry: {uri!r} is not the address of a filesystem: {_format_error(error)}"
            ) from None
        self._refreshed_at, self._changing, self._is_pushing = -float("inf"), False, False
        self._announced: tuple[float, ServingState] | None = None  # When it was read, and the state.
        self._refresh_lock = threading.RLock()
        self._files: ConditionalFiles | None = None  # opened by the first change
        self._remote_sizes: dict[int, int] = {}  # of the manifests at the address, in bytes
        self._intact: set[int] = set()  # the numbers of local manifests that are those of the address
        self._remote_serving: bytes | None = None  # the content of the serving state at the address
        self._is_owner_checked = self.owner is None

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
            text = self._read_remote(SERVING)
            self._check_remote_serving(text)
            serving = ServingState() if text is None else ServingState.parse(text, f"{self.uri}/{SERVING}")
            self._announced = now, serving
        return self._announced[1]

    def list_versions(self) -> list[int]:
        """Return the numbers of all versions at the address, ascending."""
        self._refresh()
        return sorted({*super().list_versions(), *self._remote_sizes})

    def read_version(self, number: int) -> Version:
        """Return the manifest of a version, whose files are downloaded when they are used; see `VersionRegistry`."""
        self._refresh()
        if number in self._remote_sizes and not self._locate_manifest(number).exists():
            raise CheckpointError(f"{self.uri}/{_name_manifest(number)} is damaged")
        return super().read_version(number)

    def push(self) -> None:
        """Push what the address lacks; the serving state of the address, if it has one, is kept.

        Raises:
            ConfigError: The address has other versions of the same numbers, which belong to another run.
        """
        for number in self._list_remote():
            manifest = self._locate_manifest(number)
            if manifest.exists() and read_content(manifest) != self._read_remote(_name_manifest(number)):
                raise ConfigError(
                    f"registry: {self.uri} has another version {number} than {self.root}; give each run an address of its own"
                )

        def push_serving() -> None:
            if self._remote_serving is None and (self.root / SERVING).exists():
                self._write_serving(self.serving.make_successor(self.serving))

        self._is_pushing = True
        try:
            self._change(push_serving)
        finally:
            self._is_pushing = False

    def _refresh(self) -> None:
        """Download what has changed at the address, unless it was read less than `max_age_s` ago or is being changed.

        What could not be read is read again at once, so that its problem is reported as long as it lasts.
        """
        with self._refresh_lock:
            is_recent = time.monotonic() - self._refreshed_at < self._max_age_s
            is_whole = self.problem is None and (
                self._remote_serving is None or (self.root / SERVING).exists()
            )
            if not self._changing and not (is_recent and is_whole):
                self._fetch(download_files=True)

    def _fetch(self, download_files: bool) -> None:
        """Download new manifests, and the serving state if it has changed.

        A damaged manifest is left out; whoever reads that version is told.

        Args:
            download_files: Whether the files of the served versions are downloaded before the state is replaced.
        """
        if not self._is_owner_checked:
            check_owner(self._read_remote(OWNER), self.owner, self.uri)
            self._is_owner_checked = True
        text = self._read_remote(SERVING)
        self._refreshed_at = time.monotonic()
        self._remote_sizes = self._list_remote()
        for number, size in self._remote_sizes.items():
            if number not in self._intact and self._fetch_manifest(number, size):
                self._intact.add(number)
        self._remote_serving, path = text, self.root / SERVING
        if not self._is_pushing:
            self._check_remote_serving(text)
        if text is None or (path.exists() and read_content(path) == text):
            return
        serving = ServingState.parse(text, f"{self.uri}/{SERVING}")
        for number in serving.versions if download_files else ():
            self._download(number)
        write_whole(path, text)

    def _check_remote_serving(self, text: bytes | None) -> None:
        """Check that the serving state is at the address, given its content there; see `VersionRegistry._check_serving`."""
        has_versions = text is None and ((self.root / SERVING).exists() or bool(self._list_remote()))
        self._check_serving(text, f"{self.uri}/{SERVING}", has_versions=has_versions)

    def _fetch_manifest(self, number: int, size: int) -> bool:
        """Download a manifest unless the local one is intact and as long. Returns whether it is intact."""
        path = self._locate_manifest(number)
        if path.exists() and path.stat().st_size == size and self._is_manifest(read_content(path), number):
            return True
        content = self._read_remote(_name_manifest(number))
        if content is None or not self._is_manifest(content, number):
            return False
        write_whole(path, content)
        return True

    def _is_manifest(self, content: bytes, number: int) -> bool:
        """Return whether a file is the whole manifest of a version."""
        try:
            Version.parse(content, "", number)
        except CheckpointError:
            return False
        return True

    def _download(self, number: int) -> None:
        """Download the files of a version and of those that its rows are made from.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for version in self._list_needed(number):
            for name in version.blobs:
                self.blobs.locate(name, f"a file of version {version.number}")

    def _fetch_blob(self, name: str, description: str) -> None:
        """Download a blob. Raises CheckpointError if it is missing or damaged."""
        failure = CheckpointError(f"{self.uri}/blobs/{name}: {description} is damaged or missing")
        if self._get_remote_info(f"blobs/{name}").type != pafs.FileType.File:
            raise failure
        digest = hashlib.sha256()
        with replace_file(self.blobs.root / name) as draft:
            with (
                self._convert_errors(),
                self._fs.open_input_stream(self._join_path(f"blobs/{name}")) as source,
                draft.open("wb") as target,
            ):
                while part := source.read(_PART_BYTES):
                    digest.update(part)
                    target.write(part)
            if digest.hexdigest() != name:
                raise failure

    def _list_needed(self, number: int) -> list[Version]:
        """Return a version and its ancestors up to a full one, the newest first."""
        versions = [self._read_needed(number)]
        while versions[-1].kind != FULL and versions[-1].base is not None:
            versions.append(self._read_needed(versions[-1].base))
        return versions

    def _read_needed(self, number: int) -> Version:
        """Return the manifest of a version that others need. Raises CheckpointError if there is none."""
        if not self._locate_manifest(number).exists():
            raise CheckpointError(f"{self.uri}/{_name_manifest(number)} is damaged or missing")
        return super().read_version(number)

    # --- Changing ---------------------------------------------------------------------------------------------

    def _change(self, change: Callable[[], _Result]) -> _Result:
        """Change the newest state at the address, again if another host was first; see `VersionRegistry._change`."""
        with self._lock(), self._refresh_lock:
            self._changing = True  # what is read meanwhile does not wait for downloads
            try:
                for _ in range(_MAX_ATTEMPTS):
                    self._fetch(download_files=False)
                    with suppress(StorageConflict):
                        self._store_owner()
                        self._push_missing()
                        return change()
            finally:
                self._changing = False
                self._refreshed_at, self._announced = -float("inf"), None
        raise CheckpointError(
            f"registry {self.uri} is changed by other hosts all the time, so nothing was changed; try again"
        )

    def _add_version(self, version: Version) -> Version:
        """Add a version at the address, then in the local folder; see `VersionRegistry._add_version`."""
        added = replace(version, number=self._find_next_number())
        self._push_files(added)
        self._push_manifest(added.number, added.encode())
        write_whole(self._locate_manifest(added.number), added.encode())
        return added

    def _write_serving(self, serving: ServingState) -> None:
        """Replace the serving state at the address, then in the local folder.

        Raises:
            StorageConflict: Another host has changed it since it was read.
            CheckpointError: The address does not answer, and does not have the state.
        """
        content = serving.encode()
        try:
            self._replace_remote(SERVING, content, self._remote_serving)
        except (StorageConflict, CheckpointError):
            text = self._read_remote(SERVING)  # the answer to a write that was made may have been lost
            if text is None or serving.changes[-1] not in ServingState.parse(text, self.uri).changes:
                raise
        self._remote_serving = content
        write_whole(self.root / SERVING, content)

    def _store_owner(self) -> None:
        """Record which run the versions belong to, at the address too."""
        super()._store_owner()
        if self.owner is not None and self._read_remote(OWNER) is None:
            self._replace_remote(OWNER, encode_owner(self.owner), None)

    def _prepare(self, contents: VersionContents, base: int | None) -> Version:
        """Write the files of a version and push them, so that the lock is not held during the upload."""
        version = super()._prepare(contents, base)
        self._push_files(version)
        return version

    def _push_files(self, version: Version) -> None:
        """Push the blobs of a version that the address lacks, or has of another size."""
        for name in version.blobs:
            stored, path = self._get_remote_info(f"blobs/{name}"), self.blobs.root / name
            is_other = path.exists() and stored.size != path.stat().st_size
            if stored.type != pafs.FileType.File or is_other:
                self._write_remote(f"blobs/{name}", self.blobs.locate(name).read_bytes())

    def _push_manifest(self, number: int, content: bytes) -> None:
        """Push a manifest. Raises StorageConflict if the address has another one of this number."""
        try:
            self._replace_remote(_name_manifest(number), content, None)
        except (StorageConflict, CheckpointError):
            if self._read_remote(_name_manifest(number)) != content:
                raise
        self._remote_sizes[number] = len(content)
        self._intact.add(number)

    def _push_missing(self) -> None:
        """Push the versions that the address lacks, which may be new, apart from damaged ones."""
        for number in VersionRegistry.list_versions(self):
            if number in self._remote_sizes:
                continue
            try:
                version = Version.read(self._locate_manifest(number))
                for name in version.blobs:
                    BlobStore.locate(self.blobs, name)
            except CheckpointError:
                continue
            self._push_files(version)
            self._push_manifest(number, read_content(self._locate_manifest(number)))

    # --- The filesystem ---------------------------------------------------------------------------------------

    def _replace_remote(self, name: str, content: bytes, old: bytes | None) -> None:
        """Write a small file if the address still has its old content, or none if that is None.

        Raises:
            StorageConflict: Another host was first.
            CheckpointError: The address does not answer.
            ConfigError: Another host is the only one that may write.
        """
        with self._convert_errors():
            if self._files is None:
                access = _RemoteAccess(self._read_remote, self._write_remote)
                self._files = open_conditional_files(self.uri, self._fs, self._path, access, self.root)
            self._files.replace(name, content, old)

    def _list_remote(self) -> dict[int, int]:
        """Return the size in bytes of each manifest at the address by the number of its version, ascending."""
        selector = pafs.FileSelector(self._join_path("versions"), allow_not_found=True)
        with self._convert_errors():
            infos = self._fs.get_file_info(selector)
        sizes = {info.base_name.removesuffix(".json"): info.size or 0 for info in infos}
        return {int(stem): size for stem, size in sorted(sizes.items()) if NUMBER.fullmatch(stem)}

    def _get_remote_info(self, name: str) -> pafs.FileInfo:
        """Return the type and size of a file at the address."""
        with self._convert_errors():
            return self._fs.get_file_info(self._join_path(name))

    def _read_remote(self, name: str) -> bytes | None:
        """Read a manifest or a state at the address, None if it does not exist. Raises CheckpointError if it is too large."""
        info = self._get_remote_info(name)
        if info.type != pafs.FileType.File:
            return None
        if (info.size or 0) > _MAX_CONTENT_BYTES:
            raise CheckpointError(
                f"{self.uri}/{name} has {info.size:,} bytes, of at most {_MAX_CONTENT_BYTES:,}; remove it"
            )
        with self._convert_errors(), self._fs.open_input_stream(self._join_path(name)) as file:
            return file.read()

    def _write_remote(self, name: str, content: bytes) -> None:
        """Write a file at the address atomically."""
        path = self._join_path(name)
        draft = f"{path}.{secrets.token_hex(4)}.part"  # of this writer alone
        with self._convert_errors():
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(draft) as file:
                file.write(content)
            self._fs.move(draft, path)

    def _join_path(self, name: str) -> str:
        """Return the path on the filesystem of a file, given by its name relative to the address."""
        return f"{self._path.rstrip('/')}/{name}"

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of the filesystem to CheckpointError within a context, apart from StorageConflict."""
        try:
            yield
        except StorageConflict:
            raise
        except (pa.ArrowException, OSError, StorageError) as error:
            raise CheckpointError(f"registry {self.uri} does not answer: {_format_error(error)}") from None


@dataclass(frozen=True, slots=True)
class _RemoteAccess:
    """The functions of a registry that read and write whole files at its address."""

    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]


def open_registry(
    folder: Path, address: str | None = None, owner: Mapping[str, str] | None = None
) -> VersionRegistry:
    """Open the registry of a run's serving folder.

    Args:
        folder: RUN/serving.
        address: Address of the registry; None for the address that this user has used there last, or else the folder itself;
            "" for the folder itself. The content of the folder is pushed to an address that differs from the last one.
        owner: The run, as for `VersionRegistry`.

    Raises:
        ConfigError: The address has no filesystem or a password, another run has its versions there, or the folder names an
            address that this user has neither given nor approved.
        CheckpointError: A new address does not answer.
    """
    address_file = folder / "registry.uri"
    last_address = read_registry_address(address_file)
    if address is None and last_address:
        check_address(last_address)
        check_registry(folder, last_address)
    address = last_address if address is None else address
    if not address:
        return VersionRegistry(folder / "registry", owner)
    check_address(address)
    registry = RemoteRegistry(folder / "registry", address, owner=owner)
    if address != last_address:
        registry.push()
        write_whole(address_file, address.encode())
    approve_registry(folder, address)
    return registry


def check_address(address: str) -> None:
    """Check that the address of a registry has no password, since the address is stored and told.

    Raises:
        ConfigError: It has.
    """
    if without_user := find_password(address):
        raise ConfigError(
            f"registry: a password stands in the address {without_user}; take it out and give it by the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...)"
        )


def _name_manifest(number: int) -> str:
    """Return the name of a version's manifest, relative to the address."""
    return f"versions/{number:06d}.json"


def _format_error(error: Exception) -> str:
    """Format an error as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]
