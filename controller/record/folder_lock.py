"""A lock on a folder that one process at a time holds.

The kernel's lock is used, or on a filesystem without locks a file that names the holder. The kernel releases its lock
when the process dies. The file stays: on the holder's own host, a dead process is detected; on another host it cannot be,
so the error names the file to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from pathlib import Path
from types import TracebackType

from nonet.errors import ConfigError

LOCK, HOLDER = ".lock", ".holder"


class FolderLock:
    """The lock on a folder, held until `close` or until this process ends."""

    def __init__(self, descriptor: int, holder: Path | None = None):
        self._descriptor, self._holder = descriptor, holder

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._holder is not None:
            self._holder.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._holder = -1, None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder for this process.

    Raises:
        ConfigError: Another process holds it; the message names that process where it is known.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is being run by another process; wait for its end, or stop it first"
            ) from None
        except OSError:  # this filesystem has no locks
            return FolderLock(descriptor, _create_holder_file(folder / HOLDER))
    except BaseException:
        os.close(descriptor)
        raise
    return FolderLock(descriptor)


def _create_holder_file(file: Path) -> Path:
    """Create the file that names this process, unless a living process is named there."""
    me = _identify_process(os.getpid())
    while True:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as made:
                made.write(me)
            return file
        except FileExistsError:
            _remove_dead_holder(file)


def _remove_dead_holder(file: Path) -> None:
    """Remove the file of a dead holder.

    Raises:
        ConfigError: The holder is alive, or runs on another host.
    """
    try:
        owner = file.read_text()
    except FileNotFoundError:
        return
    host, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    if host != socket.gethostname() or not pid.isdecimal():
        raise ConfigError(
            f"{file.parent} is held by process {pid or '?'} of host {host or '?'}, on a filesystem without locks; "
            f"where that process is gone, remove {file}"
        )
    if _identify_process(int(pid)) == owner:
        raise ConfigError(f"{file.parent} is being run by process {pid}; wait for its end, or stop it first")
    aside = file.with_name(f"{HOLDER}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, aside)
        if aside.read_text() == owner:
            aside.unlink()
        else:  # another process created its file between the two calls
            os.rename(aside, file)


def _identify_process(pid: int) -> str:
    """Identify a process by host, number, boot and start time, so that a reused number is not mistaken for it."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        began = boot = "gone"
    return f"{socket.gethostname()} {pid} {boot} {began}"
