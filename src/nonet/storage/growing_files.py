"""Files that are only appended to while a run works, such as the journal: their new ends are stored as parts.

Parts are merged, so that a file has a number of parts that is logarithmic in its size, up to parts of `PART_BYTES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from nonet.storage import run_tree
from nonet.storage.local_copy import RunCopy, hash_parts
from nonet.storage.run_tree import FileEntry, FilePart

_TAIL_BYTES = 4096  # of a growing file, compared before its new end is uploaded


def is_growing(name: str) -> bool:
    """Return whether a file is only appended to while a run works."""
    return name.endswith(".jsonl") or name == "trace.json" or name.startswith("tensorboard/")


class GrowingFiles:
    """What is stored of the growing files of a run.

    Args:
        copy: The work folder of the run.
        make_key: Returns a new key for a part of a file of this name, before the part is stored.
    """

    def __init__(self, copy: RunCopy, make_key: Callable[[str], str]):
        self._copy, self._make_key = copy, make_key
        self._tails: dict[str, bytes] = {}  # the last bytes of what is stored of each file

    def forget(self, name: str) -> None:
        """Forget a file that has left the run."""
        self._tails.pop(name, None)

    def upload(self, name: str, old: FileEntry | None, size: int) -> FileEntry:
        """Store the new end of a file, and return its entry.

        Args:
            name: The path of the file.
            old: What is stored; None for a new file.
            size: The number of bytes that the file has now, of which only whole lines are stored.

        Returns:
            The entry, whose size may be smaller.
        """
        file = self._copy.path / name
        size = _find_whole_lines(file, size) if name.endswith(".jsonl") else size
        parts = list(old.parts) if old else []
        if not self._continues(name, parts, size):
            parts = []
        start = sum(part.size for part in parts)
        while parts and start < size and parts[-1].size <= size - start:
            if size - start + parts[-1].size > run_tree.PART_BYTES:
                break
            start -= parts.pop().size
        for part_start in range(start, size, run_tree.PART_BYTES):
            content = _read_range(file, part_start, min(size, part_start + run_tree.PART_BYTES))
            key = self._make_key(name)
            self._copy.storage.put(key, content)
            parts.append(FilePart(key, len(content), hashlib.sha256(content).hexdigest()))
        self._tails[name] = _read_range(file, max(0, size - _TAIL_BYTES), size)
        return FileEntry(tuple(parts), file.stat().st_mtime, generation=self._copy.generation)

    def _continues(self, name: str, parts: Sequence[FilePart], size: int) -> bool:
        """Return whether a file begins with the stored parts.

        The end of what this process has stored is compared, and all bytes when it sees the file for the first time.
        """
        file, stored_size = self._copy.path / name, sum(part.size for part in parts)
        if size < stored_size:
            return False
        if (tail := self._tails.get(name)) is not None:
            return _read_range(file, stored_size - len(tail), stored_size) == tail
        return hash_parts(file, parts) == [part.sha256 for part in parts]


def _read_range(file: Path, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` to before `stop`."""
    with file.open("rb") as source:
        source.seek(start)
        return source.read(stop - start)


def _find_whole_lines(file: Path, size: int) -> int:
    """Return the number of bytes up to the last end of a line within the first `size` bytes of a file."""
    step = 1 << 16
    for stop in range(size, 0, -step):
        start = max(0, stop - step)
        position = _read_range(file, start, stop).rfind(b"\n")
        if position >= 0:
            return start + position + 1
    return 0
