"""SampleLedger: records which rows of the seeded order a model has learned from; it is saved in the model's checkpoint.

A place is a position in the order of an epoch. It is leased before its row is read, and done when the optimizer step that used
the row is complete. Leases are not saved, so a resumed run leases places again that were not done. Places are stored as roaring
bitmaps of ranges, one per epoch: 0.2 MB for 1e9 rows in order, 1.3 MB for 10 M rows of which a random half is done. A place that
is leased or done cannot be leased again, so no row counts twice unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pyroaring import BitMap64

from nonet.atomic import make_folder, write_whole
from nonet.errors import CheckpointError
from nonet.samples.ledger.manifest import DataManifest
from nonet.samples.ledger.order import OrderSlice
from nonet.suggest import join_names

_FORMAT = 3
_FORMAT_WITHOUT_CONTENT = 2  # of data whose manifest identifies no content, such as rows of an artifact
_READABLE_FORMATS = (2, 3)
_RULES = 2  # of the order
_FILES = ("ledger.json", "ledger.roar")  # the two parts of a snapshot
_NOTES_FILE = "notes-{}.json"  # of a rank other than the first


class SampleLedger:
    """The state of one stage's rows: leased, done, skipped (read, but invalid) or filtered (removed by a filter).

    Filtered rows also count as done; skipped rows do not, and they are not leased again.

    Args:
        manifest: The data that are read.
        order: A hash of everything that the order of the rows depends on.
        rows: Number of rows of an epoch.
    """

    def __init__(self, manifest: DataManifest, order: str, rows: int):
        self.manifest, self.order, self.rows = manifest, order, rows
        self._clear()

    def _clear(self) -> None:
        """Reset the ledger to an empty state."""
        # Bitmaps and counts are by epoch. The bitmap `_done` also contains the skipped places.
        self._done: dict[int, BitMap64] = {}
        self._skipped: dict[int, BitMap64] = {}
        self._complete_epochs: set[int] = set()  # epochs in which every place is done or skipped
        self._leases: dict[tuple[int, int], OrderSlice] = {}  # by (step, part)
        self._leased: dict[int, BitMap64] = {}
        self._done_counts: dict[int, int] = {}  # sizes of the bitmaps in `_done`
        self.filtered = 0  # done rows that a filter removed

    def lease(self, leased_slice: OrderSlice) -> None:
        """Lease a slice to a step. Raises CheckpointError if one of its rows is done or leased."""
        done = self._done.get(leased_slice.epoch)
        leased = self._leased.setdefault(leased_slice.epoch, BitMap64())
        was_done = leased_slice.epoch in self._complete_epochs or (
            done is not None and done.range_cardinality(leased_slice.start, leased_slice.stop)
        )
        if was_done or leased.range_cardinality(leased_slice.start, leased_slice.stop):
            raise CheckpointError(
                f"rows at places {leased_slice.start} to {leased_slice.stop} of epoch {leased_slice.epoch} "
                f"(step {leased_slice.step}) "
                f"were {'learned from' if was_done else 'leased'} before; each row counts once"
            )
        leased.add_range(leased_slice.start, leased_slice.stop)
        self._leases[leased_slice.step, leased_slice.part] = leased_slice

    def apply(self, part: OrderSlice, *, filtered: int = 0, skipped: Iterable[int] = ()) -> None:
        """Mark a leased slice as done, after the optimizer step that used it.

        Args:
            part: The slice.
            filtered: Number of rows that a filter removed.
            skipped: Places of invalid rows.

        Raises:
            CheckpointError: If the slice is not leased.
        """
        if self._leases.pop((part.step, part.part), None) is None:
            raise CheckpointError(
                f"slice {part.part} of step {part.step} is not leased, so it cannot be done"
            )
        self._leased[part.epoch].remove_range(part.start, part.stop)
        done = self._done.setdefault(part.epoch, BitMap64())
        done.add_range(part.start, part.stop)
        self.note(part, filtered, skipped)
        self._done_counts[part.epoch] = self._done_counts.get(part.epoch, 0) + part.stop - part.start
        if self._done_counts[part.epoch] == self.rows:
            self._close_epoch(part.epoch)

    def note(self, part: OrderSlice, filtered: int = 0, skipped: Iterable[int] = ()) -> None:
        """Record the number of filtered rows and the places of invalid rows of a slice, without marking the slice as done."""
        self.filtered += filtered
        if places := list(skipped):
            self._skipped.setdefault(part.epoch, BitMap64()).update(places)

    def apply_step(self, step: int) -> None:
        """Mark every leased slice of a step as done."""
        for part in [part for (leased_step, _), part in self._leases.items() if leased_step == step]:
            self.apply(part)

    def count_done_rows(self, epoch: int) -> int:
        """Count the rows of an epoch that are done."""
        if epoch in self._complete_epochs:
            return self.rows - self.count_skipped_rows(epoch)
        return len(self._done.get(epoch, BitMap64()) - self._skipped.get(epoch, BitMap64()))

    def count_skipped_rows(self, epoch: int) -> int:
        """Count the invalid rows of an epoch."""
        return len(self._skipped.get(epoch, ()))

    def is_done(self, part: OrderSlice) -> bool:
        """Return whether every row of a slice is done or skipped."""
        done = self._done.get(part.epoch)
        return part.epoch in self._complete_epochs or (
            done is not None and done.contains_range(part.start, part.stop)
        )

    def get_done_places(self, epoch: int) -> np.ndarray:
        """Return the done places of an epoch in ascending order, [n] int64."""
        done = BitMap64(range(self.rows)) if epoch in self._complete_epochs else BitMap64()
        done |= self._done.get(epoch, BitMap64())
        return np.array((done - self._skipped.get(epoch, BitMap64())).to_array(), np.int64)

    def count_rows(self) -> dict[str, int]:
        """Return the number of complete epochs, and the done, skipped, filtered and leased rows over all epochs."""
        epochs = self._complete_epochs | set(self._done)
        return {
            "epochs": len(self._complete_epochs),
            "done": sum(self.count_done_rows(epoch) for epoch in epochs),
            "skipped": sum(map(len, self._skipped.values())),
            "filtered": self.filtered,
            "leased": sum(part.stop - part.start for part in self._leases.values()),
        }

    # --- saved in a checkpoint -------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[bytes, bytes]:
        """Return the content of `ledger.json` and the bitmaps as of now; leases are not included."""
        bitmaps, parts = [], []
        for kind, bitmap_by_epoch in (("done", self._done), ("skipped", self._skipped)):
            for epoch, places in bitmap_by_epoch.items():
                places.run_optimize()
                bitmaps.append(places.serialize())
                parts.append([kind, epoch, len(bitmaps[-1])])
        body = {
            "format": _FORMAT if self.manifest.has_content else _FORMAT_WITHOUT_CONTENT,
            "rows": self.rows,
            "rules": _RULES,
            "order": self.order,
            "whole": sorted(self._complete_epochs),
            "filtered": self.filtered,
            "parts": parts,
            "manifest": self.manifest.as_json(),
        }
        return json.dumps(body).encode(), b"".join(bitmaps)

    def restore(self, ledger_json: bytes, bitmaps: bytes, where: str = "the commit") -> None:
        """Replace the state by that of a snapshot.

        Args:
            ledger_json: Content of `ledger.json`.
            bitmaps: The serialized bitmaps, one after another in the order of "parts".
            where: Prefix of error messages.

        Raises:
            CheckpointError: If the snapshot belongs to other data or another order; the message says what differs.
        """
        saved: Mapping[str, Any] = json.loads(ledger_json)
        # A run of format 1 keeps the rules of its order under later versions.
        written_format = saved["format"] if saved.get("rules", 1) == _RULES else 1
        if written_format not in _READABLE_FORMATS:
            raise CheckpointError(
                f"{where}: the ledger has format {written_format}; this version reads {join_names(_READABLE_FORMATS)}. Resume "
                "with the version that wrote it"
            )
        if changes := DataManifest.from_json(saved["manifest"]).describe_changes(self.manifest):
            raise CheckpointError(
                f"{where} was trained on other data: {changes}. Put the data back, or start afresh."
            )
        if (saved["order"], saved["rows"]) != (self.order, self.rows):
            raise CheckpointError(
                f"{where} read the same data in another order (seed, stage, filters, maps, rows of a step, row groups or "
                "`take`); set them as they were, or start afresh"
            )
        self._clear()
        self._complete_epochs, self.filtered, start = set(saved["whole"]), saved["filtered"], 0
        for kind, epoch, size_bytes in saved["parts"]:
            bitmap_by_epoch = self._done if kind == "done" else self._skipped
            bitmap_by_epoch[epoch] = BitMap64.deserialize(bitmaps[start : start + size_bytes])
            if kind == "done":
                self._done_counts[epoch] = len(bitmap_by_epoch[epoch])
            start += size_bytes

    @staticmethod
    def read_manifest(folder: Path) -> DataManifest:
        """Read the manifest of the data that a checkpoint was trained on."""
        return DataManifest.from_json(json.loads((folder / "samples" / _FILES[0]).read_bytes())["manifest"])

    def load(self, folder: Path, rank: int = 0) -> None:
        """Restore the ledger of a checkpoint folder.

        Rank 0 also takes over the notes of all other ranks, so a resumed run may have another number of ranks.
        """
        ledger_json, bitmaps = ((folder / "samples" / name).read_bytes() for name in _FILES)
        self.restore(ledger_json, bitmaps, str(folder))
        if rank:
            self.filtered, self._skipped = 0, {}
            return
        for path in sorted((folder / "samples").glob(_NOTES_FILE.format("*"))):
            notes = json.loads(path.read_text())
            self.filtered += notes["filtered"]
            for epoch, places in notes["skipped"].items():
                self._skipped.setdefault(int(epoch), BitMap64()).update(places)

    def dump_notes(self) -> str:
        """Return the filtered rows and skipped places of a rank other than the first, as JSON."""
        skipped = {epoch: list(places) for epoch, places in self._skipped.items()}
        return json.dumps({"filtered": self.filtered, "skipped": skipped})

    def _close_epoch(self, epoch: int) -> None:
        """Record that an epoch is complete, and drop its bitmaps of done and leased places."""
        self._complete_epochs.add(epoch)
        for by_epoch in (self._done, self._leased, self._done_counts):
            by_epoch.pop(epoch, None)


def write_snapshot(snapshot: tuple[bytes, bytes], folder: Path) -> list[Path]:
    """Write a ledger's snapshot to samples/ in a checkpoint folder and return the written paths."""
    make_folder(folder / "samples")
    paths = [folder / "samples" / name for name in _FILES]
    for path, content in zip(paths, snapshot, strict=True):
        write_whole(path, content)
    return paths


def write_notes(notes: str, rank: int, folder: Path) -> list[Path]:
    """Write a rank's notes to a checkpoint folder and return the written paths."""
    make_folder(folder / "samples")
    path = folder / "samples" / _NOTES_FILE.format(rank)
    write_whole(path, notes.encode())
    return [path]


def has_ledger(folder: str | Path) -> bool:
    """Return whether a checkpoint contains a ledger."""
    return (Path(folder) / "samples" / _FILES[0]).is_file()
