"""Records which places of the seeded order a model has learned from; it is saved in the model's checkpoint.

A place is leased before it is read, and done when the optimizer step that used it is complete; leased places that are not
done are returned. Places are stored as roaring bitmaps of ranges, one per epoch: 0.2 MB for 1e9 rows in order, 1.3 MB for
10 M rows of which a random half is done. A place that is leased or done cannot be leased again, so no row counts twice
unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pyroaring import BitMap64

from nonet.atomic import make_folder, write_whole
from nonet.errors import CheckpointError
from nonet.samples.ledger.manifest import DataManifest
from nonet.samples.ledger.order import OrderSlice

_FORMAT = 2
_READ_FORMATS = (1, 2)
_NAMES = ("ledger.json", "ledger.roar")
_NOTES = "notes-{}.json"


class SampleLedger:
    """The account of one stage's rows.

    Rows that were read and are no good are `skipped`: neither done nor free.

    Args:
        manifest: what is read.
        order: a hash of everything that the order of the rows depends on.
        rows: rows of an epoch.
        first_order: the same by the rules of format 1, which knew neither filters, maps nor rows of a step; None where both rules
            are the same.
        use_first_rules: called where a snapshot of format 1 is restored, so that its reader reads on in the order of that format.
    """

    def __init__(
        self,
        manifest: DataManifest,
        order: str,
        rows: int,
        *,
        first_order: str | None = None,
        use_first_rules: Callable[[], None] | None = None,
    ):
        self.manifest, self.order, self.rows = manifest, order, rows
        self.rules, self._first_order, self._use_first_rules = _FORMAT, first_order, use_first_rules
        self._clear()

    def _clear(self) -> None:
        """Reset the ledger to an empty state."""
        self._done: dict[int, BitMap64] = {}
        self._skipped: dict[int, BitMap64] = {}
        self._whole: set[int] = set()  # epochs in which every place is done or skipped
        self._leases: dict[tuple[int, int], OrderSlice] = {}
        self._leased: dict[int, BitMap64] = {}
        self._counted: dict[int, int] = {}  # done places of an epoch, including skipped ones
        self.filtered = 0  # done rows that a filter removed

    def lease(self, leased_slice: OrderSlice) -> None:
        """Lease a slice to a step. Raises CheckpointError if one of its rows is done or leased."""
        done, leased = (
            self._done.get(leased_slice.epoch),
            self._leased.setdefault(leased_slice.epoch, BitMap64()),
        )
        again = leased_slice.epoch in self._whole or (
            done is not None and done.range_cardinality(leased_slice.start, leased_slice.stop)
        )
        if again or leased.range_cardinality(leased_slice.start, leased_slice.stop):
            raise CheckpointError(
                f"rows at places {leased_slice.start} to {leased_slice.stop} of epoch {leased_slice.epoch} "
                f"(step {leased_slice.step}) "
                f"were {'learned from' if again else 'leased'} before; each row counts once"
            )
        leased.add_range(leased_slice.start, leased_slice.stop)
        self._leases[leased_slice.step, leased_slice.part] = leased_slice

    def apply(self, part: OrderSlice, *, filtered: int = 0, skipped: Iterable[int] = ()) -> None:
        """Mark a leased slice as done, after the optimizer step that used it.

        Args:
            part: The slice.
            filtered: Rows that a filter removed.
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
        self._counted[part.epoch] = self._counted.get(part.epoch, 0) + part.stop - part.start
        if self._counted[part.epoch] == self.rows:
            self._close_epoch(part.epoch)

    def note(self, part: OrderSlice, filtered: int = 0, skipped: Iterable[int] = ()) -> None:
        """Record the filtered rows and the places of invalid rows of a slice before it is done."""
        self.filtered += filtered
        if bad := list(skipped):
            self._skipped.setdefault(part.epoch, BitMap64()).update(bad)

    def apply_step(self, step: int) -> None:
        """Mark every leased slice of a step as done."""
        for part in [part for (of, _), part in self._leases.items() if of == step]:
            self.apply(part)

    def count_done_rows(self, epoch: int) -> int:
        """Count the rows of an epoch that are done."""
        if epoch in self._whole:
            return self.rows - self.count_skipped_rows(epoch)
        return len(self._done.get(epoch, BitMap64()) - self._skipped.get(epoch, BitMap64()))

    def count_skipped_rows(self, epoch: int) -> int:
        """Count the invalid rows of an epoch."""
        return len(self._skipped.get(epoch, ()))

    def is_done(self, part: OrderSlice) -> bool:
        """Return whether every row of a slice is done or skipped."""
        done = self._done.get(part.epoch)
        return part.epoch in self._whole or (done is not None and done.contains_range(part.start, part.stop))

    def get_done_places(self, epoch: int) -> np.ndarray:
        """Return the done places of an epoch, ascending."""
        done = BitMap64() if epoch not in self._whole else BitMap64(range(self.rows))
        done |= self._done.get(epoch, BitMap64())
        return np.array((done - self._skipped.get(epoch, BitMap64())).to_array(), np.int64)

    def count_rows(self) -> dict[str, int]:
        """Return the number of complete epochs, and the done, skipped, filtered and leased rows over all epochs."""
        epochs = self._whole | set(self._done)
        return {
            "epochs": len(self._whole),
            "done": sum(self.count_done_rows(epoch) for epoch in epochs),
            "skipped": sum(map(len, self._skipped.values())),
            "filtered": self.filtered,
            "leased": sum(part.stop - part.start for part in self._leases.values()),
        }

    # --- in a commit ------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[bytes, bytes]:
        """Return the content of `ledger.json` and the bitmaps as of now; leases are not included."""
        bitmaps, parts = [], []
        for kind, bits in (("done", self._done), ("skipped", self._skipped)):
            for epoch, places in bits.items():
                places.run_optimize()
                bitmaps.append(places.serialize())
                parts.append([kind, epoch, len(bitmaps[-1])])
        body = {
            "format": _FORMAT,
            "rows": self.rows,
            "rules": self.rules,
            "order": self._get_order(self.rules),
            "whole": sorted(self._whole),
            "filtered": self.filtered,
            "parts": parts,
            "manifest": self.manifest.as_json(),
        }
        return json.dumps(body).encode(), b"".join(bitmaps)

    def restore(self, ledger_json: bytes, bitmaps: bytes, where: str = "the commit") -> None:
        """Continue from a snapshot.

        Args:
            ledger_json: Content of `ledger.json`.
            bitmaps: The bitmaps.
            where: Prefix of error messages.

        Raises:
            CheckpointError: If the snapshot belongs to other data or another order; the message says what differs.
        """
        facts: Mapping[str, Any] = json.loads(ledger_json)
        if facts["format"] not in _READ_FORMATS:
            known = " and ".join(map(str, _READ_FORMATS))
            raise CheckpointError(
                f"{where}: the ledger has format {facts['format']}; this version reads {known}. Resume with the "
                "version that wrote it"
            )
        if changes := DataManifest.from_json(facts["manifest"]).describe_changes(self.manifest):
            raise CheckpointError(
                f"{where} was trained on other data: {changes}. Put the data back, or start afresh."
            )
        rules = facts.get("rules", 1)
        if (facts["order"], facts["rows"]) != (self._get_order(rules), self.rows):
            raise CheckpointError(
                f"{where} read the same data in another order (seed, stage, filters, maps, rows of a step, row groups or "
                "`take`); set them as they were, or start afresh"
            )
        self._clear()
        self.rules = rules
        if rules == 1 and self._use_first_rules is not None:
            self._use_first_rules()
        self._whole, self.filtered, at = set(facts["whole"]), facts["filtered"], 0
        for kind, epoch, size in facts["parts"]:
            bits = self._done if kind == "done" else self._skipped
            bits[epoch] = BitMap64.deserialize(bitmaps[at : at + size])
            if kind == "done":
                self._counted[epoch] = len(bits[epoch])
            at += size

    def _get_order(self, rules: int) -> str:
        return self._first_order if rules == 1 and self._first_order is not None else self.order

    @staticmethod
    def read_manifest(folder: Path) -> DataManifest:
        """Read the manifest of the data that a checkpoint was trained on."""
        return DataManifest.from_json(json.loads((folder / "samples" / _NAMES[0]).read_bytes())["manifest"])

    def load(self, folder: Path, rank: int = 0) -> None:
        """Continue from a checkpoint folder; rank 0 takes over the notes of all ranks, independent of their number."""
        body, bitmaps = ((folder / "samples" / name).read_bytes() for name in _NAMES)
        self.restore(body, bitmaps, str(folder))
        if rank:
            self.filtered, self._skipped = 0, {}
            return
        for path in sorted((folder / "samples").glob(_NOTES.format("*"))):
            notes = json.loads(path.read_text())
            self.filtered += notes["filtered"]
            for epoch, places in notes["skipped"].items():
                self._skipped.setdefault(int(epoch), BitMap64()).update(places)

    def dump_notes(self) -> str:
        """Return the filtered rows and skipped places of a rank other than the first, as JSON."""
        skipped = {epoch: list(places) for epoch, places in self._skipped.items()}
        return json.dumps({"filtered": self.filtered, "skipped": skipped})

    def _close_epoch(self, epoch: int) -> None:
        """Replace the places of a complete epoch by a flag."""
        self._whole.add(epoch)
        for places in (self._done, self._leased, self._counted):
            places.pop(epoch, None)


def write_snapshot(snapshot: tuple[bytes, bytes], folder: Path) -> list[Path]:
    """Write a ledger's snapshot to samples/ in a checkpoint folder and return the written paths."""
    make_folder(folder / "samples")
    paths = [folder / "samples" / name for name in _NAMES]
    for path, content in zip(paths, snapshot, strict=True):
        write_whole(path, content)
    return paths


def write_notes(notes: str, rank: int, folder: Path) -> list[Path]:
    """Write a rank's notes to a checkpoint folder and return the written paths."""
    make_folder(folder / "samples")
    path = folder / "samples" / _NOTES.format(rank)
    write_whole(path, notes.encode())
    return [path]


def has_ledger(folder: str | Path) -> bool:
    """Return whether a checkpoint contains a ledger."""
    return (Path(folder) / "samples" / _NAMES[0]).is_file()
