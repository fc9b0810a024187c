"""The data of a run and how they are read: what the tokenise stage receives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.fs import LocalFileSystem

from nonet.cache import find_cache_root
from nonet.errors import ConfigError
from nonet.models.tokenizer.kinds import TOKENIZERS
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
    LogChanges,
    PreparationReport,
    PreparedSequences,
    filter_events,
    prepare_sequences,
    read_sample,
)
from nonet.samples.sequences import (
    Compress,
    CompressedLog,
    CountOptions,
    LabelCounts,
    Labels,
    Sequences,
    Transitions,
    UnknownItems,
    build_sequences,
    drop_unknown_events,
    get_part_starts,
    parse_min_events,
)
from nonet.samples.sources import SOURCES
from nonet.samples.tables import (
    count_rows,
    find_files,
    identify_file,
    read_tables,
)
from nonet.samples.tokenised import StoredSequences
from nonet.workers.roles.artifacts.cache import ArtifactCache
from nonet.workers.roles.artifacts.folders import store_artifact
from nonet.workers.roles.artifacts.known_run import KnownRun

MEMORY_EVENTS = 5_000_000  # Sequences with more events are prepared on disk; in memory they need up to 93 bytes per event.
_BLOCK_ROWS = 1 << 16  # Rows of nulls that stand for items.


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
        cache: The folder of the artifacts that runs share; None for the cache of the node, "" for none.
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
    cache: str | None = ""

    def open_cache(self, root: Path) -> ArtifactCache:
        """Open the cache of artifacts for the run whose artifacts are in a folder."""
        if self.cache is not None:
            return ArtifactCache(Path(self.cache) if self.cache else None, root)
        try:
            return ArtifactCache(find_cache_root(), root)
        except ConfigError as error:
            return ArtifactCache(None, root, str(error))

    def list_tables(self) -> dict[str, str]:
        """Return the path of each table by its key in `data`."""
        paths = {"interactions": self.options.interactions, "items": self.options.items}
        paths |= {f"vectors.{name}": path for name, path in self.options.vectors.items()}
        paths |= {f"labels.{labels.name}.path": labels.path for labels in self.labels}
        paths |= {f"graph.{name}.table": graph.table for name, graph in self.graphs.items()}
        return {key: path for key, path in paths.items() if path}

    def describe_sequences(self) -> dict[str, Any] | None:
        """Return what the sequences follow from: the content of the tables and the options, as JSON; None if that is not known.

        Raises:
            DataError: A file cannot be read.
        """
        tables: dict[str, list[list[Any]]] = {}
        for key, path in self.list_tables().items():
            if not key.startswith("graph."):  # which are read after the sequences are made
                found = find_files(path, key)
                tables[key] = [
                    [_name_file(file, identity, path), identity, found.partitions.values[file]]
                    for file, identity in found.identify(key)
                ]
        options = self.options.to_fingerprint()
        options = {
            key: value for key, value in options.items() if key not in ("interactions", "items", "vectors")
        }
        if any(identity.startswith("time:") for files in tables.values() for _, identity, _ in files):
            return None  # A store without ETags does not tell equal content.
        labels = [label.to_fingerprint() | {"path": ""} for label in self.labels]
        return {
            "tables": tables,
            "options": options,
            "labels": labels,
            "drop_unlabelled": self.drop_unlabelled,
            "compress": self.compress and self.compress.model_dump(),
            "disk": self.is_prepared_on_disk(),
        }

    def describe_memory(self) -> dict[str, Any]:
        """Return what, with the sequences, the memory's counts and signals follow from, as JSON."""
        votes = {name: self.votes.get(name) for name in ("cooccurrence", "signals")}
        chosen = {"seed": self.seed, "last": self.votes["last"]} if self.chooses_votes else None
        return {"transitions": dict(self.transitions), "votes": votes, "chosen": chosen}

    def describe_tokenizer(self) -> dict[str, Any] | None:
        """Return what, with the sequences, the semantic ids follow from, as JSON; None if that is not known.

        Raises:
            DataError: A file cannot be read.
        """
        options = dict(self.tokenizer)
        list_inputs = TOKENIZERS.get(options.pop("use")).list_inputs
        if list_inputs is None or self.known is not None:
            return None
        files: list[Path] | None = load_heavy(list_inputs)(options, Path(self.folder))
        if files is None:
            return None
        contents = [
            [os.path.relpath(file, self.folder), identify_file(LocalFileSystem(), str(file), str(file))]
            for file in files
        ]
        return {"tokenizer": dict(self.tokenizer), "contents": contents, "seed": self.seed}

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
        """Read both tables, and return the sequences, their items, and what was changed and left out."""
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
        """Return a table of nulls with a row for each item, or without rows if the footers of the files do not tell their number.

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


def _name_file(path: str, identity: str, address: str) -> list[str]:
    """Return the name of a file in a key; an ETag tells content only at its address, which then belongs to the name."""
    return [path, address] if identity.startswith("etag:") else [path.rpartition("/")[2]]
