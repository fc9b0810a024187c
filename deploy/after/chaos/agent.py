"""FaultAgent: an actor that disturbs the processes of its node, and the functions that it does it with."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from pathlib import Path

_PIDFD_GETFD = 438  # the number of the system call, on all architectures
_ESTABLISHED = "01"  # the state of a connection in /proc/PID/net/tcp
_POLL_S = 0.1


class FaultAgent:
    """Disturbs the processes of the node on which it is an actor. All methods ignore processes that have ended."""

    def ping(self) -> None:
        """Return when the agent has started."""

    def kill(self, pid: int) -> None:
        """Kill a process."""
        _send_signal(pid, signal.SIGKILL)

    def suspend(self, pid: int, max_s: float) -> None:
        """Suspend a process for some seconds, or until it has ended."""
        _send_signal(pid, signal.SIGSTOP)
        end = time.monotonic() + max_s
        while time.monotonic() < end and is_alive(pid):
            time.sleep(_POLL_S)
        _send_signal(pid, signal.SIGCONT)

    def cut_connections(self, pid: int) -> int:
        """Close the TCP connections of a process, and return their number.

        Raises:
            PermissionError: The sockets of the process cannot be reached.
        """
        return cut_connections(pid)

    def kill_node(self) -> None:
        """Kill Ray's process of this node and all processes that it has started, this one last."""
        raylet = os.getppid()
        own_pid = os.getpid()
        pids = [pid for pid in list_descendants(raylet) if pid != own_pid]
        for pid in (raylet, *pids, own_pid):
            _send_signal(pid, signal.SIGKILL)


def cut_connections(pid: int) -> int:
    """Close the established TCP connections of a process of this machine, as a network that fails does for both ends.

    Returns:
        The number of connections; 0 if the process has ended.

    Raises:
        PermissionError: The sockets of the process cannot be reached.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    try:
        established = _list_established(pid)
        pidfd = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    try:
        for number, inode in _list_sockets(pid).items():
            if inode not in established:
                continue
            descriptor = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
            if descriptor >= 0:
                _shut_down(descriptor)
                count += 1
            elif (
                error := ctypes.get_errno()
            ) == 1:  # EPERM; other errors mean that the socket was closed meanwhile
                raise PermissionError(error, f"the sockets of process {pid} cannot be reached")
    finally:
        os.close(pidfd)
    return count


def _shut_down(descriptor: int) -> None:
    """Shut both directions of a connection down."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed meanwhile
            return


def _list_sockets(pid: int) -> dict[int, str]:
    """Return the inode of each socket of a process, by the number of its descriptor."""
    sockets: dict[int, str] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(entry)
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if link.startswith("socket:["):
            sockets[int(entry.name)] = link[len("socket:[") : -1]
    return sockets


def _list_established(pid: int) -> set[str]:
    """Return the inodes of the established TCP connections in the network namespace of a process."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                inodes.add(fields[9])
    return inodes


def list_descendants(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started, and of those that they have started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, frontier = list[int](), [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process unless it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
