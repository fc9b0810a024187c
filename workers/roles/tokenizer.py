"""Tokeniser: tables in, artifacts out: sequences, semantic ids, catalogue trie.

Every artifact is written aside and renamed to a folder named after the hash of its files, so that a resumed run finds
what it needs or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import write_whole
from nonet.errors import DataError
from nonet.models.tokenizer import KnownSids
from nonet.samples.preparation import (
    BuildOptions,
    PreparationReport,
    PreparedSequences,
    prepare_sequences,
    read_sample,
)
from nonet.samples.sequences import (
    TEST,
    TRAIN,
    CompressedLog,
    CountOptions,
    EventTotals,
    LabelSetup,
    Sequences,
    Transitions,
    add_labels,
    build_sequences,
    compress_log,
    load_item_keys,
    load_user_keys,
)
from nonet.samples.tables import (
    MISSING,
    ROLES,
    TableFormat,
    compile_condition,
    count_rows,
    get_licence_notice,
    read_interactions,
    read_tables,
)
from nonet.samples.tokenised import StoredSequences
from nonet.workers.devices import HOST, get_device
from nonet.workers.runtime import DistributeWorker, Replicate, method

MEMORY_EVENTS = (
    5_000_000  # above which sequences are prepared on disk; in memory they peak at 93 bytes an event
)
PREPARING, PREPARED, COMPRESSED = "preparing.json", "prepared.json", "compressed.json"


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The data of a run that weights start from: its id, folders of its sequences and semantic ids (None: a click model's,
    which has none), K of their levels."""

    run: str
    sequences: str
    sids: str | None
    codes: tuple[int, ...]

    def tokens(self) -> KnownSids | None:
        """The semantic ids that its items keep."""
        if self.sids is None:
            return None
        return KnownSids.load(Path(self.sequences), Path(self.sids), self.codes, f"run {self.run}")

    def counts(self, seq: Sequences) -> dict[str, int]:
        """How many users and items of other sequences it knows."""
        users, items = load_user_keys(Path(self.sequences)), load_item_keys(Path(self.sequences))
        assert items is not None  # checked when the run was named
        assert seq.user_key is not None
        assert seq.item_key is not None
        return {
            "known_users": int(np.isin(seq.user_key, users).sum()),
            "users": len(seq),
            "known_items": int(np.isin(seq.item_key, items).sum()),
            "items": len(seq.item_key),
        }


@dataclass(frozen=True, slots=True)
class DataSetup:
    """What to read and how: paths, column names, filters, split, target conditions by stage, tokenizer configuration,
    what holds of repeats (None: the data decides), how transitions are counted (CountOptions), the period in seconds and
    "item" or "category" by which repeated events become one, labels that come later, and texts that stand for a missing value."""

    interactions: str
    items: str | None
    columns: Mapping[str, str]
    keep: Mapping[str, int]
    where: str | None
    split: Mapping[str, Any]
    targets: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    folder: str
    seed: int
    known: KnownRun | None = None
    repeats: str | None = None
    transitions: Mapping[str, Any] = field(default_factory=dict)
    prepare: str | None = None
    compress: tuple[float, str] | None = None
    labels: LabelSetup | None = None
    stored: StoredSequences | None = None
    missing: tuple[str, ...] = MISSING

    @property
    def table_format(self) -> TableFormat:
        """Column names and missing texts that the tables are read with."""
        return TableFormat(dict(self.columns), self.missing)

    def on_disk(self) -> bool:
        """Whether sequences are prepared on disk: as `prepare` says, else where there are more than five million events."""
        if self.compress is not None or self.labels is not None:
            return False
        if self.prepare is not None:
            return self.prepare == "disk"
        return count_rows(self.interactions, "interactions") > MEMORY_EVENTS

    def prepared(
        self, root: Path, tell: Callable[[PreparationReport], None] | None = None
    ) -> PreparedSequences:
        """Sequences on disk under root, in memory that does not grow with the events. Raises DataError."""
        options = BuildOptions(
            self.interactions,
            self.items,
            dict(self.columns),
            dict(self.keep),
            dict(self.split),
            dict(self.targets),
            self.where,
            self.repeats,
            self.missing,
        )
        return prepare_sequences(options, root, report_progress=tell)

    def build(self) -> tuple[Sequences, pa.Table]:
        """Read both tables; sequences and the items they are over. Raises DataError."""
        return self.built()[:2]

    def built(self) -> tuple[Sequences, pa.Table, CompressedLog | None]:
        """`build`, and the log as it was compressed, where it was."""
        interactions, items = read_tables(self.interactions, self.items, self.table_format)
        interactions = self.labelled(interactions)
        log = self.compressed(interactions, items)
        interactions = interactions if log is None else log.events
        return *build_sequences(
            interactions,
            items,
            keep=self.keep,
            split=self.split,
            targets=self.targets,
            where=self.where,
            repeats=self.repeats,
            strict=self.compress is not None,
        ), log

    def labelled(self, interactions: pa.Table) -> pa.Table:
        """Checked interactions with the column of their labels, where there are some."""
        if self.labels is None:
            return interactions
        names = {name: source for name, source in self.columns.items() if name in ROLES}
        return add_labels(
            interactions,
            read_interactions(self.labels.path, self.table_format.replace_columns(names)),
            self.labels,
        )

    def compressed(self, interactions: pa.Table, items: pa.Table | None) -> CompressedLog | None:
        """Checked interactions that `where` keeps, with their repeats beside; None where they are taken as they are."""
        if self.compress is None:
            return None
        if self.where:
            interactions = interactions.filter(
                compile_condition(self.where, interactions.schema, name="data.where")
            )
        return compress_log(interactions, *self.compress, items)

    def sampled(self) -> tuple[pa.Table, pa.Schema]:
        """Checked interactions of one row group, and the columns of the items, without rows: what a driver looks at where all
        is too much. Raises DataError and ConfigError for files, columns, rows and conditions that cannot be."""
        return read_sample(
            self.interactions, self.items, self.table_format, (self.where, *self.targets.values())
        )

    def count(self, folder: Path, seq: Sequences, n_items: int) -> Transitions:
        """Write the transitions of the training events. Raises ConfigError for a kind of event that is not there."""
        options = dict(self.transitions)
        options = CountOptions(**{**options, "events": tuple(options.get("events", ()))})
        return Transitions.write(folder, seq, n_items, options)


class Tokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write the artifacts under run_folder/artifacts; {"artifacts": {kind: {path, sha256}}, "data", "tokenizer"}."""
        if self.rank:
            return {}
        try:
            return self._artifacts(data, run_folder)
        finally:  # the process goes on as the evaluator
            get_device(HOST).release()

    def _artifacts(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        from nonet.models.generation import Trie
        from nonet.models.tokenizer import tokenise

        root = Path(run_folder) / "artifacts"
        seq, items, sequences = sequences_of(data, root)
        known = data.known and data.known.tokens()
        tokens = tokenise(
            items, seq, dict(data.tokenizer), seed=data.seed, folder=Path(data.folder), known=known
        )
        trie = Trie.build(tokens.sids, tokens.codes)
        written = {
            "sequences": sequences,
            "sids": keep(root, "sids", lambda folder: write_sids(folder, tokens.sids)),
            "catalogue": keep(root, "catalogue", trie.save),
            "transitions": keep(root, "transitions", lambda folder: data.count(folder, seq, len(items))),
        }
        facts = facts_of(seq, items, data)
        if data.stored is not None:
            folders = {kind: artifact["path"] for kind, artifact in written.items()}
            facts["data"]["stored"] = data.stored.write(seq, folders)
        facts["data"]["repeats"] = _repeats(seq, data)
        if data.compress is not None:
            facts["data"]["compressed"] = json.loads((root / COMPRESSED).read_bytes())
        return {"artifacts": written, "tokenizer": tokens.report, **facts}


def sequences_of(data: DataSetup, root: Path) -> tuple[Sequences, pa.Table, dict[str, str]]:
    """Sequences, the items they are over, and the artifact under root that holds both. Raises DataError.

    How far a preparation on disk is stands in root/preparing.json meanwhile.
    """
    if not data.on_disk():
        seq, items, log = data.built()
        if log is not None:
            keep(
                root,
                "repeats",
                lambda folder: pq.write_table(log.repeats, folder / "repeats.parquet", compression="zstd"),
            )
            write_whole(root / COMPRESSED, json.dumps(log.measure_savings()).encode())
        return seq, items, keep(root, "sequences", lambda folder: write_sequences(folder, seq, items))
    root.mkdir(parents=True, exist_ok=True)
    told = root / PREPARING

    def tell(report: PreparationReport) -> None:
        write_whole(told, json.dumps({"text": report.format_line(), "rows": report.rows}).encode())

    try:
        prepared = data.prepared(root, tell)
    finally:
        told.unlink(missing_ok=True)
    artifact = {"kind": "sequences", "path": str(prepared.folder), "sha256": prepared.sha256}
    facts = {"seconds": prepared.seconds, "cpu_s": prepared.cpu_s}
    write_whole(root / PREPARED, json.dumps(facts).encode())
    seq, items = prepared.open()
    _check(seq, data)
    return seq, items, artifact


def _check(seq: Sequences, data: DataSetup) -> None:
    """Raises DataError for what the driver finds in data that it can read whole."""
    sums = EventTotals.from_sequences(seq)
    if not sums.events[TEST]:
        raise DataError(
            f"no user is left to test: data.split {dict(data.split)} holds out more events than the {len(seq)} users have; "
            "lower data.split or data.keep"
        )
    for name, events in sums.taught.items():
        if not events:
            raise DataError(
                f"stages.{name}.target: {data.targets[name]!r} holds for none of the {sums.events[TRAIN]} training events: the "
                "stage would train on nothing. Widen it, or leave it out"
            )


def facts_of(seq: Sequences, items: pa.Table, data: DataSetup) -> dict[str, Any]:
    """{"data": what the run's report and predictions say of it, "init": what is known to the run that weights start from}."""
    sums = EventTotals.from_sequences(seq)
    facts = {
        "users": len(seq),
        "items": len(items),
        "events": len(seq.item),
        "trained_events": sums.events[TRAIN],
        "users_only_trained": len(seq) - sums.tested,
        "duplicates": sums.duplicates,
        **sums.measure_training(seq),
        "held_out": sums.get_held_out_counts(),
        "dropped": list(seq.dropped),
        "notice": get_licence_notice(data.interactions) or "",
    }
    return {"data": facts} | ({"init": data.known.counts(seq)} if data.known else {})


def _repeats(seq: Sequences, data: DataSetup) -> dict[str, Any]:
    """The policy, whether the data or the scenario chose it, and the share of each split's events that are repeats."""
    chosen_by = "data" if data.repeats is None else "scenario"
    return {"policy": seq.repeats, "chosen_by": chosen_by, "share": seq.repeat_shares}


def write_sequences(folder: Path, seq: Sequences, items: pa.Table) -> None:
    seq.save(folder)
    pq.write_table(items, folder / "items.parquet")


def write_sids(folder: Path, sids: np.ndarray) -> None:
    """Semantic ids [I, L] of all items, in their order."""
    levels = {f"l{level}": pa.array(sids[:, level].astype(np.int32)) for level in range(sids.shape[1])}
    pq.write_table(
        pa.table({"item": pa.array(np.arange(len(sids), dtype=np.int64)), **levels}), folder / "sids.parquet"
    )


def keep(root: Path, kind: str, write: Callable[[Path], Any]) -> dict[str, str]:
    """Write an artifact aside and move it to <kind>-<sha8>; the same content lands in the same folder.

    Not `replacing`: the name is the hash of what was written, and a whole folder takes it.
    """
    aside = root / f"tmp-{kind}-{uuid.uuid4().hex[:8]}"
    aside.mkdir(parents=True)
    write(aside)
    files = {
        str(path.relative_to(aside)): _sha256(path) for path in sorted(aside.rglob("*")) if path.is_file()
    }
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    final = root / f"{kind}-{digest[:8]}"
    if final.exists():
        shutil.rmtree(aside)
    else:
        os.replace(aside, final)
    return {"kind": kind, "path": str(final), "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
