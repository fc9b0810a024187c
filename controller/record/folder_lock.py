"""A lock on a folder that one process at a time holds.

The lock is a `flock` on the file LOCK, which the kernel releases when the process dies. On a filesystem without locks it is
the file HOLDER, which names the process and stays when that process dies. On the same host, the next process detects that
and removes the file. On another host it cannot, so the error names the file to remove.
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

LOCK, HOLDER = ".lock", ".holder"  # names of files in a locked folder


class FolderLock:
    """The lock on a folder, held until `close` or until this process ends.

    Args:
        descriptor: The open file descriptor of LOCK.
        holder: The path of HOLDER, on a filesystem without locks.
    """

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
        ConfigError: Another process holds the lock; the message names that process where it is known.
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
    """Create the file HOLDER with the identity of this process, and return its path.

    Raises:
        ConfigError: The file names another process, which is alive or runs on another host.
    """
    identity = _identify_process(os.getpid())
    while True:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as holder:
                holder.write(identity)
            return file
        except FileExistsError:
            _remove_dead_holder(file)


def _remove_dead_holder(file: Path) -> None:
    """Remove the file HOLDER if the process that it names is dead.

    Raises:
        ConfigError: That process is alive, or runs on another host.
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
    # Several processes may find the dead holder at once: only the one whose rename succeeds removes its file.
    renamed = file.with_name(f"{HOLDER}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, renamed)
        if renamed.read_text() == owner:
            renamed.unlink()
        else:  # another process created its own file after this one had read the dead one's
            os.rename(renamed, file)


def _identify_process(pid: int) -> str:
    """Return "host pid boot-id start-time" of a process, which differs between two processes with the same pid.

    For a process that does not exist, boot-id and start-time are "gone".
    """
    try:
        # Field 22 of /proc/PID/stat is the start time. The name in field 2 may contain spaces, so split after its ")".
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        began = boot = "gone"
    return f"{socket.gethostname()} {pid} {boot} {began}"
