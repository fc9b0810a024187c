"""A folder on a disk that loses what was not synced: what is left of it after the power fails.

`os.fsync` and `os.fdatasync` of a file keep its bytes, `os.fsync` of a folder the names in it, as POSIX promises and no more.
What was never synced may be there or not, so a test looks at two ends: `left("synced")`, where only synced names are there, and
`left("named")`, where every name is there (renames and deletions included, as journalling filesystems write them first) over the
bytes that were synced. `before` stops the work in front of any one call that changes the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODES = ("synced", "named")
_CHANGES = ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (shutil, "rmtree"))


class PowerLoss(BaseException):
    """The machine stops here."""


class LosingDisk:
    """Everything under `root`; what is there at first is on the disk already."""

    def __init__(self, root: Path, monkeypatch):
        self.root, self._patch = root, monkeypatch
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: list[int] = []  # numbers of inodes are given again once nobody holds them
        for path in (root, *root.rglob("*")):
            self._keep(path)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._fsync)

    def _fsync(self, file) -> None:
        number = file if isinstance(file, int) else file.fileno()
        inode = os.fstat(number).st_ino
        for path in (self.root, *self.root.rglob("*")):
            if path.stat().st_ino == inode:
                return self._keep(path)
        return None

    def _keep(self, path: Path) -> None:
        self._open.append(os.open(path, os.O_RDONLY))
        inode = path.stat().st_ino
        if path.is_dir():
            self._names[inode] = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
        else:
            self._bytes[inode] = path.read_bytes()

    def left(self, mode: str, into: Path) -> Path:
        """Write the tree as it is after a power loss now into a folder; for `mode` see the module."""
        inode = self.root.stat().st_ino
        self._write(into, inode, self._names.get if mode == "synced" else self._there)
        return into

    def _there(self, inode: int) -> dict[str, tuple[int, bool]]:
        folder = next(path for path in (self.root, *self.root.rglob("*")) if path.stat().st_ino == inode)
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(folder)}

    def _write(self, into: Path, inode: int, names: Callable[[int], dict | None]) -> None:
        into.mkdir()
        for name, (child, folder) in (names(inode) or {}).items():
            if folder:
                self._write(into / name, child, names)
            else:
                (into / name).write_bytes(self._bytes.get(child, b""))

    @contextmanager
    def before(self, number: int) -> Iterator[list[bool]]:
        """Lose power before the call number `number` (from 0) that changes the disk; [True] once that has happened."""
        count, lost = iter(range(1 << 30)), []

        def stopping(call: Callable) -> Callable:
            def stopped(*args, **kwargs):
                if not lost and next(count) == number:
                    lost.append(True)
                if lost:
                    raise PowerLoss
                return call(*args, **kwargs)

            return stopped

        with self._patch.context() as patch:
            for module, name in _CHANGES:
                patch.setattr(module, name, stopping(getattr(module, name)))
            with suppress(PowerLoss):
                yield lost

    def close(self) -> None:
        for number in self._open:
            os.close(number)
