"""Tokeniser: creates the artifacts of a run (sequences, semantic ids, catalogue trie and transitions) from its tables.

Every artifact is written to a temporary folder, which is then renamed after the hash of its files. So a resumed run finds either
a complete artifact or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import write_whole
from nonet.errors import DataError
from nonet.plugins import load_heavy
from nonet.samples.batches import (
    NEW,
    NewEventCounts,
    choose_new_targets,
    load_new_events,
    write_new_events,
)
from nonet.samples.batches.graphs import Graph, Graphs, read_edges
from nonet.samples.preparation import (
    BuildOptions,
    EventLog,
    LogChanges,
    PreparationReport,
    PreparedSequences,
    filter_events,
    prepare_sequences,
    read_sample,
)
from nonet.samples.sequences import (
    TEST,
    TRAIN,
    VALID,
    Compress,
    CompressedLog,
    CountOptions,
    EventTotals,
    LabelCounts,
    Labels,
    Sequences,
    Transitions,
    UnknownItems,
    build_sequences,
    check_kinds,
    drop_unknown_events,
    get_part_starts,
    is_task,
    parse_min_events,
)
from nonet.samples.sources import SOURCES
from nonet.samples.tables import (
    count_rows,
    get_licence_notice,
    read_tables,
)
from nonet.samples.tokenised import StoredSequences
from nonet.storage import put
from nonet.workers.devices import HOST, get_device
from nonet.workers.roles.settings import KnownRun
from nonet.workers.runtime import DistributeWorker, Replicate, method

MEMORY_EVENTS = 5_000_000  # Sequences with more events are prepared on disk; in memory they need up to 93 bytes per event.
_BLOCK_ROWS = 1 << 16  # Rows of nulls that stand for items.
PREPARING, PREPARED, COMPRESSED = "preparing.json", "prepared.json", "compressed.json"
"""Files in the folder of the artifacts: progress and duration of a preparation on disk, and savings by compression."""
UNKNOWN = "unknown_items.json"
"""File in the folder of the artifacts: counts of the events that were left out because the items table lacks their item."""
LABELS = "labels.json"
"""File in the folder of the artifacts: how many rows of each label file found an event."""


@dataclass(frozen=True, slots=True)
class BuiltData:
    """Sequences that were built in memory.

    Attributes:
        sequences: The sequences.
        items: Their items.
        log: The compressed log; None without compression.
        unknown: What was left out because the items table lacks its item; None if that is an error.
        labels: How many rows of each label file found an event, by the name of the label.
    """

    sequences: Sequences
    items: pa.Table
    log: CompressedLog | None
    unknown: UnknownItems | None
    labels: Mapping[str, LabelCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetup:
    """The data of a run and how they are read.

    Attributes:
        options: How sequences are built from the tables.
        tokenizer: Configuration of the tokenizer.
        folder: Folder of the scenario, to which paths are relative.
        seed: Seed of the run.
        known: Data of the run that weights are loaded from; None for a fresh start.
        transitions: Options of counting transitions (`CountOptions`).
        votes: Options of the memory's votes (`VoteOptions`); empty without a memory.
        chooses_votes: Whether validation chooses some of them (`choose_votes`).
        prepare: "disk" or "memory"; None for disk if there are more than `MEMORY_EVENTS` events.
        compress: How repeated events become one; None for no compression.
        labels: Labels that arrive after their events.
        drop_unlabelled: Whether events of which no label is known yet are removed.
        stored: Store that the sequences are written to; None for no store.
        source: The source of the trainers' samples (`use`) and its options in a run.
        graphs: Graphs of users and items by name.
    """

    options: BuildOptions
    tokenizer: Mapping[str, Any]
    folder: str
    seed: int
    known: KnownRun | None = None
    transitions: Mapping[str, Any] = field(default_factory=dict)
    votes: Mapping[str, Any] = field(default_factory=dict)
    chooses_votes: bool = False
    prepare: str | None = None
    compress: Compress | None = None
    labels: tuple[Labels, ...] = ()
    drop_unlabelled: bool = False
    stored: StoredSequences | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, Graph] = field(default_factory=dict)

    def is_prepared_on_disk(self) -> bool:
        """Return whether sequences are prepared on disk: as `prepare` says, else if there are more than `MEMORY_EVENTS`."""
        if self.prepare is not None:
            return self.prepare == "disk"
        return count_rows(self.options.interactions, "interactions") > MEMORY_EVENTS

    def prepare_on_disk(
        self, root: Path, report_progress: Callable[[PreparationReport], None] | None = None
    ) -> PreparedSequences:
        """Prepare the sequences on disk, with memory that does not grow with the events.

        Args:
            root: Folder of the artifacts.
            report_progress: Called with the progress.

        Raises:
            DataError: The data cannot be used.
        """
        return prepare_sequences(self.options, root, changes=self.changes, report_progress=report_progress)

    @property
    def changes(self) -> LogChanges:
        """The changes of the log: labels and compression."""
        part_starts = get_part_starts(self.options.split)
        return LogChanges(self.labels, self.drop_unlabelled, self.compress, part_starts)

    def build(self) -> tuple[Sequences, pa.Table]:
        """Read both tables, and return the sequences and their items.

        Raises:
            DataError: The data cannot be used.
        """
        built = self.build_with_facts()
        return built.sequences, built.items

    def build_with_facts(self) -> BuiltData:
        """Return the result of `build`, the compressed log, and what was left out."""
        table_format = self.changes.extend_format(self.options.table_format)
        interactions, items = read_tables(self.options.interactions, self.options.items, table_format)
        items = None if items is None else self.options.attach_vectors(items)
        (interactions, labels), unknown = self.attach_labels(interactions), None
        if self.options.drop_unknown_items and items is not None:
            interactions = filter_events(interactions, self.options.where)
            interactions, unknown = drop_unknown_events(interactions, items["item_id"])
            unknown.check()
        log = self.compress_events(interactions, items)
        interactions = interactions if log is None else log.events
        seq, known_items = build_sequences(
            interactions,
            items,
            keep=self.options.keep,
            split=self.options.split,
            targets=self.options.targets,
            where=self.options.where,
            repeats=self.options.repeats,
            strict=self.compress is not None,
        )
        return BuiltData(seq, known_items, log, unknown, labels)

    def count_unknown_in_source(self, items: pa.Table) -> dict[str, Any]:
        """Count the events of the trainers' files that are left out because the run does not have their item.

        Args:
            items: The items of the run.

        Returns:
            {"unknown_items_in_source": counts as `UnknownItems.to_facts`}; empty if such events are an error, or the trainers
            read the run's own events.
        """
        count = SOURCES.get(self.source["use"]).count_unknown if self.source else None
        if count is None or not self.options.drop_unknown_items:
            return {}
        options = {name: value for name, value in self.source.items() if name != "use"}
        return {"unknown_items_in_source": load_heavy(count)(options, items["item_id"]).to_facts()}

    def attach_labels(self, interactions: pa.Table) -> tuple[pa.Table, dict[str, LabelCounts]]:
        """Add the columns of the labels to checked interactions, if the setup has labels, and count those that found an event."""
        return self.changes.attach_labels(interactions, self.options.table_format, self.options.where)

    def compress_events(self, interactions: pa.Table, items: pa.Table | None) -> CompressedLog | None:
        """Compress the checked interactions that `where` keeps; None without compression."""
        return self.changes.compress_events(interactions, items, self.options.where)

    def sample_tables(self) -> tuple[pa.Table, pa.Schema]:
        """Read one row group of checked interactions, and the columns of the items without rows, for checks before a run.

        Raises:
            DataError: Files or rows are not valid.
            ConfigError: Columns or conditions are not valid.
        """
        return read_sample(
            self.options.interactions,
            self.options.items,
            self.options.table_format,
            {
                "data.where": self.options.where,
                **{f"stages.{stage}.target": target for stage, target in self.options.targets.items()},
            },
            self.changes,
            self.options.vectors,
        )

    def make_catalogue(self, schema: pa.Schema) -> pa.Table:
        """Return as many rows of nulls as there are items, as far as the footers of the items table tell; else none.

        Args:
            schema: The schema of the items.
        """
        options = self.options
        if options.items is None or parse_min_events(options.keep)[0]:
            return schema.empty_table()
        n_items = count_rows(options.items, "items")
        block = pa.table([pa.nulls(_BLOCK_ROWS, field.type) for field in schema], schema=schema)
        blocks = [block] * (n_items // _BLOCK_ROWS)  # which share their memory
        return pa.concat_tables([*blocks, block.slice(0, n_items % _BLOCK_ROWS)])

    def build_graphs(self, seq: Sequences, items: pa.Table, folder: Path) -> Graphs:
        """Build the graphs of the sequences and items of a run, and write them to a folder.

        Raises:
            DataError: A table of edges cannot be used.
        """
        ids = {"item": np.asarray(items["item_id"]), "user": np.asarray(seq.user_id)}
        tables = {name: read_edges(name, graph, ids) for name, graph in self.graphs.items() if graph.table}
        return Graphs.build(self.graphs, seq, len(items), tables, self.seed, folder)

    def choose_new_targets(self, seq: Sequences) -> tuple[np.ndarray, NewEventCounts] | None:
        """Choose the events that a run trains on that continues another one; None for a run that trains on all.

        Raises:
            DataError: No training event is new, or a stage has no target among those that are trained on.
        """
        if (known := self.known) is None or known.replay is None:
            return None
        earlier = Sequences.load(known.sequences)
        rejected = None if known.rejected is None else load_new_events(known.rejected) == NEW
        return choose_new_targets(seq, earlier, known.replay, self.seed, known.run, rejected)

    def store_new_events(self, root: Path, seq: Sequences) -> tuple[dict[str, Any], dict[str, Any]]:
        """Store which events a run trains on that continues another one.

        Args:
            root: Folder of the artifacts.
            seq: Sequences of the run.

        Returns:
            {"targets": the artifact} and {"new": the counts as `NewEventCounts.as_dict`}; empty for a run that trains on all.
        """
        if (chosen := self.choose_new_targets(seq)) is None:
            return {}, {}
        codes, counts = chosen
        artifact = store_artifact(root, "targets", lambda folder: write_new_events(folder, codes))
        return {"targets": artifact}, {"new": counts.as_dict()}

    def write_memory(self, folder: Path, seq: Sequences, items: pa.Table) -> None:
        """Count transitions and, if they vote, co-occurrence of items in training events; write them and the signals of items.

        Validation may choose options of the votes, which the files of transitions contain.

        Args:
            folder: Folder of the artifact.
            seq: Sequences of the run.
            items: The item table.

        Raises:
            ConfigError: A kind of event does not exist.
            DataError: A signal is no column of words.
        """
        from nonet.models.generation import choose_votes, count_cooccurrence
        from nonet.models.tokenizer import compute_signals

        options = CountOptions(**{**self.transitions, "events": tuple(self.transitions.get("events", ()))})
        transitions = Transitions.write(folder, seq, len(items), options)
        cooccurrence = None
        if self.votes.get("cooccurrence"):
            cooccurrence = count_cooccurrence(folder, seq, options, len(items))
        if signals := self.votes.get("signals"):
            compute_signals(items, signals).save(folder)
        if self.chooses_votes:
            chosen = choose_votes(seq, transitions, cooccurrence, self.votes["last"], self.seed)
            replace(transitions, chosen=chosen).save_meta(folder)


class Tokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write the artifacts to run_folder/artifacts.

        Args:
            data: The data and how they are read.
            run_folder: Folder of the run.

        Returns:
            "artifacts": {kind: {kind, path, sha256}}, "tokenizer": the report of the tokenizer, and the result of
            `describe_data`; an empty dict on ranks other than 0.
        """
        if self.rank != 0:
            return {}
        try:
            return self._write_artifacts(data, run_folder)
        finally:  # The process may continue as the evaluator, which needs the freed memory.
            get_device(HOST).release()

    def _write_artifacts(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Create and write all artifacts, and return the result of `prepare`."""
        from nonet.models.generation import Trie
        from nonet.models.tokenizer import tokenise

        root = Path(run_folder) / "artifacts"
        seq, items, sequences_artifact = make_sequences(data, root)
        new_artifact, new_counts = data.store_new_events(root, seq)
        known_sids = data.known and data.known.load_sids()
        tokens = tokenise(
            items, seq, dict(data.tokenizer), seed=data.seed, folder=Path(data.folder), known=known_sids
        )
        trie = Trie.build(tokens.sids, tokens.codes)
        artifacts = {
            "sequences": sequences_artifact,
            "sids": store_artifact(root, "sids", lambda folder: write_sids(folder, tokens.sids)),
            "catalogue": store_artifact(root, "catalogue", trie.save),
            "transitions": store_artifact(
                root, "transitions", lambda folder: data.write_memory(folder, seq, items)
            ),
        }
        artifacts |= new_artifact
        facts = describe_data(seq, items, data)
        facts["data"] |= new_counts
        if data.stored is not None:
            folders = {kind: artifact["path"] for kind, artifact in artifacts.items()}
            facts["data"]["stored"] = data.stored.write(seq, folders)
        facts["data"]["repeats"] = _describe_repeats(seq, data)
        if data.chooses_votes:
            facts["data"]["votes"] = Transitions.load(artifacts["transitions"]["path"]).chosen
        if data.votes.get("cold"):
            facts["data"]["cold"] = _describe_cold_items(seq, items)
        facts["data"] |= read_preparation_facts(root) | data.count_unknown_in_source(items)
        put(root)
        return {"artifacts": artifacts, "tokenizer": tokens.report, **facts}


_DRAFT = re.compile(r"tmp-[a-z]+-[0-9a-f]{8}")


def make_sequences(data: DataSetup, root: Path) -> tuple[Sequences, pa.Table, dict[str, str]]:
    """Create the sequences and their items, and write them as an artifact under root.

    Temporary folders of earlier attempts, which were killed, are deleted first. While sequences are prepared on disk,
    root/preparing.json has the progress.

    Returns:
        The sequences, the items, and {kind, path, sha256} of the artifact.

    Raises:
        DataError: The data cannot be used.
    """
    root.mkdir(parents=True, exist_ok=True)
    _delete_drafts(root, "*")
    if not data.is_prepared_on_disk():
        built = data.build_with_facts()
        seq, items, log = built.sequences, built.items, built.log
        if built.unknown is not None:
            write_whole(root / UNKNOWN, json.dumps(built.unknown.to_facts()).encode())
        _write_label_counts(root, built.labels)
        if log is not None:
            store_artifact(
                root,
                "repeats",
                lambda folder: pq.write_table(log.repeats, folder / "repeats.parquet", compression="zstd"),
            )
            write_whole(root / COMPRESSED, json.dumps(log.measure_savings()).encode())
        return (
            seq,
            items,
            store_artifact(root, "sequences", lambda folder: write_sequences(folder, seq, items)),
        )
    progress_file = root / PREPARING

    def report_progress(report: PreparationReport) -> None:
        text = json.dumps({"text": report.format_line(), "rows": report.rows})
        write_whole(progress_file, text.encode())

    try:
        prepared = data.prepare_on_disk(root, report_progress)
    finally:
        progress_file.unlink(missing_ok=True)
    artifact = {"kind": "sequences", "path": str(prepared.folder), "sha256": prepared.sha256}
    facts = {"seconds": prepared.seconds, "cpu_s": prepared.cpu_s}
    write_whole(root / PREPARED, json.dumps(facts).encode())
    if prepared.savings is not None:
        write_whole(root / COMPRESSED, json.dumps(prepared.savings).encode())
    if prepared.unknown is not None:
        write_whole(root / UNKNOWN, json.dumps(prepared.unknown).encode())
    _write_label_counts(root, prepared.labels)
    seq, items = prepared.open()
    check_sequences(seq, data)
    return seq, items, artifact


def _describe_cold_items(seq: Sequences, items: pa.Table) -> dict[str, int]:
    """Return the number of "items" without a training event, and of validation and test events with one, "valid" and "test"."""
    is_cold = items["events"].to_numpy() == 0
    counts = {"items": int(is_cold.sum()), "valid": 0, "test": 0}
    for part in seq.iterate_parts():
        for name, split in (("valid", VALID), ("test", TEST)):
            counts[name] += int(is_cold[part.item[part.split == split]].sum())
    return counts


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


def describe_data(seq: Sequences, items: pa.Table, data: DataSetup) -> dict[str, Any]:
    """Describe the data.

    Returns:
        "data": facts for the report and for predictions, and with a known run "init": counts of the users and items that this
        run knows.
    """
    totals = EventTotals.from_sequences(seq)
    facts = {
        "users": len(seq),
        "items": len(items),
        "events": len(seq.item),
        "trained_events": totals.events[TRAIN],
        "users_only_trained": len(seq) - totals.tested,
        "duplicates": totals.duplicates,
        **totals.measure_training(seq),
        "held_out": totals.get_held_out_counts(),
        "dropped": list(seq.dropped),
        "time_unit": EventLog(data.options.interactions, data.options.table_format).find_time_unit(),
        "notice": get_licence_notice(data.options.interactions) or "",
    }
    return {"data": facts} | ({"init": data.known.count_known(seq)} if data.known else {})


def _describe_repeats(seq: Sequences, data: DataSetup) -> dict[str, Any]:
    """Return the policy for repeats, whether the scenario or the data chose it, and shares of repeated events.

    "share" is that of each split, and "immediate" the share of the test events whose item is that of the event right before.
    """
    return {
        "policy": seq.repeats,
        "chosen_by": "data" if data.options.repeats is None else "scenario",
        "share": seq.repeat_shares,
        "immediate": seq.measure_immediate_repeats(TEST),
    }


def write_sequences(folder: Path, seq: Sequences, items: pa.Table) -> None:
    """Write the sequences and their items to a folder."""
    seq.save(folder)
    pq.write_table(items, folder / "items.parquet")


def write_sids(folder: Path, sids: np.ndarray) -> None:
    """Write the semantic ids [I, L] of all items, in their order."""
    levels = {f"l{level}": pa.array(sids[:, level].astype(np.int32)) for level in range(sids.shape[1])}
    pq.write_table(
        pa.table({"item": pa.array(np.arange(len(sids), dtype=np.int64)), **levels}), folder / "sids.parquet"
    )


def store_artifact(root: Path, kind: str, write: Callable[[Path], Any]) -> dict[str, Any]:
    """Write an artifact to a temporary folder and rename it to <kind>-<first 8 digits of its SHA-256>.

    Equal contents share a folder: if one with that name exists, it is complete, and the temporary folder is removed. Only one
    process may write artifacts of a kind at a time; temporary folders that killed ones have left are deleted.

    Args:
        root: Folder of the artifacts.
        kind: Kind of the artifact.
        write: Writes the files into a folder.

    Returns:
        Kind, path and SHA-256 of the artifact, and the names of its files.
    """
    _delete_drafts(root, kind)
    staging = root / f"tmp-{kind}-{uuid.uuid4().hex[:8]}"
    staging.mkdir(parents=True)
    write(staging)
    hash_by_file = {
        str(path.relative_to(staging)): _hash_file(path)
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256(json.dumps(hash_by_file, sort_keys=True).encode()).hexdigest()
    final = root / f"{kind}-{digest[:8]}"
    if final.exists():
        shutil.rmtree(staging)
    else:
        os.replace(staging, final)
    return {"kind": kind, "path": str(final), "sha256": digest, "files": list(hash_by_file)}


def _delete_drafts(root: Path, kind: str) -> None:
    """Delete the temporary folders of artifacts of a kind, or of all kinds for "*"."""
    for draft in root.glob(f"tmp-{kind}-*") if not root.is_symlink() else ():
        if _DRAFT.fullmatch(draft.name):
            shutil.rmtree(draft)


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
