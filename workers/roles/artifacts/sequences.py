"""Makes the sequences of a run from its tables, in memory or on disk, and checks them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import write_whole
from nonet.errors import DataError
from nonet.samples.preparation import (
    PreparationReport,
)
from nonet.samples.sequences import (
    TEST,
    TRAIN,
    EventTotals,
    LabelCounts,
    Sequences,
    check_kinds,
    is_task,
)
from nonet.samples.tokenised import read_items
from nonet.workers.roles.artifacts.cache import ArtifactCache, MadeArtifacts
from nonet.workers.roles.artifacts.data_setup import BuiltData, DataSetup
from nonet.workers.roles.artifacts.folders import PREPARING, delete_drafts, store_artifact, write_sequences

PREPARED, COMPRESSED = "prepared.json", "compressed.json"
"""Files in the folder of the artifacts: the duration of a preparation on disk, and savings by compression."""
UNKNOWN = "unknown_items.json"
"""File in the folder of the artifacts: counts of the events that were left out because the items table lacks their item."""
LABELS = "labels.json"
"""File in the folder of the artifacts: how many rows of each label file found an event."""
_FACT_FILES = (COMPRESSED, UNKNOWN, LABELS)


def make_sequences(
    data: DataSetup, root: Path, shared: ArtifactCache | None = None
) -> tuple[Sequences, pa.Table, dict[str, Any]]:
    """Create the sequences and their items as an artifact under root, or take them from the cache of artifacts.

    Temporary folders of earlier attempts, which were killed, are deleted first. While sequences are prepared on disk,
    root/preparing.json has the progress.

    Args:
        data: The data and how they are read.
        root: Folder of the artifacts.
        shared: The cache; None for none.

    Returns:
        The sequences, the items, and {kind, path, sha256} of the artifact.

    Raises:
        DataError: The data cannot be used.
    """
    root.mkdir(parents=True, exist_ok=True)
    delete_drafts(root, "*")
    shared = shared or ArtifactCache(None, root)
    on_disk = data.is_prepared_on_disk()
    built: BuiltData | None = None

    def make() -> MadeArtifacts:
        nonlocal built
        for name in _FACT_FILES:  # of an earlier attempt with other data
            (root / name).unlink(missing_ok=True)
        if on_disk:
            artifact, repeats = _prepare_on_disk(data, root)
        else:
            built = data.build_with_facts()
            artifact, repeats = _write_built(built, root)
        facts = [name for name in _FACT_FILES if (root / name).is_file()]
        return MadeArtifacts((artifact,), {}, (*facts, *repeats))

    artifact = shared.get_or_make("sequences", data.describe_sequences, make).artifacts[0]
    for left in root.glob("preparing-*"):  # of an attempt that was killed, if the cache has them now
        shutil.rmtree(left, ignore_errors=True)
    seq, items = open_sequences(Path(artifact["path"])) if built is None else (built.sequences, built.items)
    if on_disk:
        check_sequences(seq, data)
    return seq, items, artifact


def open_sequences(folder: Path) -> tuple[Sequences, pa.Table]:
    """Open the sequences and the item table of an artifact."""
    return Sequences.load(folder), read_items({"sequences": str(folder)})


def _write_built(built: BuiltData, root: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write sequences that were built in memory, and facts about them beside them.

    Returns:
        The artifact, and the name of the folder of the events that compression removed, if there is one.
    """
    repeats: tuple[str, ...] = ()
    seq, items, log = built.sequences, built.items, built.log
    if built.unknown is not None:
        write_whole(root / UNKNOWN, json.dumps(built.unknown.to_facts()).encode())
    _write_label_counts(root, built.labels)
    if log is not None:
        stored = store_artifact(
            root,
            "repeats",
            lambda folder: pq.write_table(log.repeats, folder / "repeats.parquet", compression="zstd"),
        )
        repeats = (Path(stored["path"]).name,)
        write_whole(root / COMPRESSED, json.dumps(log.measure_savings()).encode())
    return store_artifact(root, "sequences", lambda folder: write_sequences(folder, seq, items)), repeats


def _prepare_on_disk(data: DataSetup, root: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Prepare the sequences on disk, and write their progress and facts about them beside them; return as `_write_built`."""
    progress_file = root / PREPARING

    def report_progress(report: PreparationReport) -> None:
        text = json.dumps({"text": report.format_line(), "rows": report.rows})
        write_whole(progress_file, text.encode())

    try:
        prepared = data.prepare_on_disk(root, report_progress)
    finally:
        progress_file.unlink(missing_ok=True)
    facts = {"seconds": prepared.seconds, "cpu_s": prepared.cpu_s}
    write_whole(root / PREPARED, json.dumps(facts).encode())
    if prepared.savings is not None:
        write_whole(root / COMPRESSED, json.dumps(prepared.savings).encode())
    if prepared.unknown is not None:
        write_whole(root / UNKNOWN, json.dumps(prepared.unknown).encode())
    _write_label_counts(root, prepared.labels)
    return {"kind": "sequences", "path": str(prepared.folder), "sha256": prepared.sha256}, prepared.repeats


def _write_label_counts(root: Path, labels: Mapping[str, LabelCounts]) -> None:
    """Write how many rows of each label file found an event, if there are labels."""
    if labels:
        counts = {name: asdict(counts) for name, counts in labels.items()}
        write_whole(root / LABELS, json.dumps(counts).encode())


def read_preparation_facts(root: Path) -> dict[str, Any]:
    """Read the facts of the preparation from the folder of the artifacts.

    Returns:
        "compressed", what the compression of the events saved, "unknown_items", the counts of the events that were left out
        because the items table lacks their item, and "label_files", how many rows of each label file found an event
        (`LabelCounts`); without compression, where such events are an error, and without labels, these are missing.
    """
    files = {"compressed": root / COMPRESSED, "unknown_items": root / UNKNOWN, "label_files": root / LABELS}
    return {name: json.loads(path.read_bytes()) for name, path in files.items() if path.is_file()}


def check_sequences(seq: Sequences, data: DataSetup) -> None:
    """Check that the sequences have items that are known, users to test, targets to train on and the memory's kinds of events.

    Raises:
        DataError: No item is known to the run that `init` names, no user is left to test, or no training event of a stage is a
            target. A task may have none.
        ConfigError: A kind of event does not exist.
    """
    check_kinds(seq, data.transitions.get("events", ()))
    if data.known and not data.known.count_known(seq)["known_items"]:
        raise DataError(
            f"init: none of the items is known to run {data.known.run}, so there is nothing to start from; name a run on items "
            "of these ids, or leave init out"
        )
    totals = EventTotals.from_sequences(seq)
    if not totals.events[TEST]:
        raise DataError(
            f"no user is left to test: data.split {dict(data.options.split)} holds out more events than the {len(seq)} users "
            f"have (the longest history has {int(seq.lengths.max(initial=0))}); lower data.split or data.keep"
        )
    for stage, target_events in totals.taught.items():
        if not target_events and not is_task(stage):
            raise DataError(
                f"stages.{stage}.target: {data.options.targets[stage]!r} holds for none of the {totals.events[TRAIN]} training "
                "events: the stage would train on nothing. Widen the condition, or remove it"
            )
