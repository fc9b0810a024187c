"""Hold a folder, one process at a time: by the kernel's lock, or on a filesystem without locks by a file that names the holder.

The kernel frees its lock when the holder dies. The file stays: on the holder's own host it is seen that nobody is there; on
another host nobody can know, and the error says which file to remove.
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


class Held:
    """A folder held until `close`, or until this process ends."""

    def __init__(self, descriptor: int, holder: Path | None = None):
        self._descriptor, self._holder = descriptor, holder

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._holder is not None:
            self._holder.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._holder = -1, None

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold(folder: Path) -> Held:
    """Hold a folder. Raises ConfigError that says who has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is being run by another process; wait for its end, or stop it first"
            ) from None
        except OSError:  # this filesystem has no locks
            return Held(descriptor, _sign(folder / HOLDER))
    except BaseException:
        os.close(descriptor)
        raise
    return Held(descriptor)


def _sign(file: Path) -> Path:
    """Create the file that names this process, where no living one is named."""
    me = _name(os.getpid())
    while True:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as made:
                made.write(me)
            return file
        except FileExistsError:
            _clear(file)


def _clear(file: Path) -> None:
    """Take a dead holder's file away. Raises ConfigError where the holder lives, or may live."""
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
    if _name(int(pid)) == owner:
        raise ConfigError(f"{file.parent} is being run by process {pid}; wait for its end, or stop it first")
    aside = file.with_name(f"{HOLDER}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(file, aside)
        if aside.read_text() == owner:
            aside.unlink()
        else:  # somebody signed between the two calls
            os.rename(aside, file)


def _name(pid: int) -> str:
    """Host, process and when it began, so that neither a reused number nor a new boot passes for it."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        began = boot = "gone"
    return f"{socket.gethostname()} {pid} {boot} {began}"
