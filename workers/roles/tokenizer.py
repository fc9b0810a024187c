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

from nonet.models.generation import Trie
from nonet.models.tokenizer import KnownSids, tokenise
from nonet.samples.sequences import (
    RL,
    TEST,
    TRAIN,
    VALID,
    CountOptions,
    Sequences,
    Transitions,
    build_sequences,
    item_keys,
    user_keys,
)
from nonet.samples.tables import notice, read_tables
from nonet.workers.runtime import DistributeWorker, Replicate, method


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
        users, items = user_keys(Path(self.sequences)), item_keys(Path(self.sequences))
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
    what holds of repeats (None: the data decides), and how transitions are counted (CountOptions)."""

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

    def build(self) -> tuple[Sequences, pa.Table]:
        """Read both tables; sequences and the items they are over. Raises DataError."""
        interactions, items = read_tables(self.interactions, self.items, dict(self.columns))
        return build_sequences(
            interactions,
            items,
            keep=self.keep,
            split=self.split,
            targets=self.targets,
            where=self.where,
            repeats=self.repeats,
        )

    def counted(self, seq: Sequences, n_items: int) -> Transitions:
        """The transitions of the training events. Raises ConfigError for a kind of event that is not there."""
        options = dict(self.transitions)
        return Transitions.fit(
            seq, n_items, CountOptions(**{**options, "events": tuple(options.get("events", ()))})
        )


class Tokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write the artifacts under run_folder/artifacts; {"artifacts": {kind: {path, sha256}}, "data", "tokenizer"}."""
        if self.rank:
            return {}
        seq, items = data.build()
        known = data.known and data.known.tokens()
        tokens = tokenise(
            items, seq, dict(data.tokenizer), seed=data.seed, folder=Path(data.folder), known=known
        )
        trie = Trie.build(tokens.sids, tokens.codes)
        root = Path(run_folder) / "artifacts"
        written = {
            "sequences": keep(root, "sequences", lambda folder: write_sequences(folder, seq, items)),
            "sids": keep(root, "sids", lambda folder: _write_sids(folder, tokens.sids)),
            "catalogue": keep(root, "catalogue", trie.save),
            "transitions": keep(root, "transitions", data.counted(seq, len(items)).save),
        }
        facts = facts_of(seq, items, data)
        facts["data"]["repeats"] = _repeats(seq, data)
        return {"artifacts": written, "tokenizer": tokens.report, **facts}


def facts_of(seq: Any, items: pa.Table, data: DataSetup) -> dict[str, Any]:
    """{"data": what the run's report and predictions say of it, "init": what is known to the run that weights start from}."""
    held_out = {
        name: int((seq.split == split).sum())
        for name, split in (("rl", RL), ("valid", VALID), ("test", TEST))
    }
    for mask in list(seq.targets.values())[:1]:
        held_out["test_target"] = int((mask & (seq.split == TEST)).sum())
    facts = {
        "users": len(seq),
        "items": len(items),
        "events": len(seq.item),
        "trained_events": int((seq.split == TRAIN).sum()),
        "users_only_trained": int(
            sum(
                1
                for u in range(len(seq))
                if not (seq.split[seq.offsets[u] : seq.offsets[u + 1]] == TEST).any()
            )
        ),
        **_lengths(seq),
        "held_out": held_out,
        "dropped": list(seq.dropped),
        "notice": notice(data.interactions) or "",
    }
    return {"data": facts} | ({"init": data.known.counts(seq)} if data.known else {})


def _repeats(seq: Sequences, data: DataSetup) -> dict[str, Any]:
    """The policy, whether the data or the scenario chose it, and the share of each split's events that are repeats."""
    chosen_by = "data" if data.repeats is None else "scenario"
    return {"policy": seq.repeats, "chosen_by": chosen_by, "share": seq.repeat_shares}


def _lengths(seq: Any) -> dict[str, Any]:
    """What predictions need: how unequal users' training lengths are, and what share of events each target keeps."""
    train = seq.split == TRAIN
    lengths = np.add.reduceat(train.astype(np.int64), seq.offsets[:-1])
    shares = {name: float(mask[train].mean()) for name, mask in seq.targets.items()}
    times = seq.time[train]
    span_s = int(times.max() - times.min()) if len(times) else 0
    return {
        "train_span_s": span_s,
        "train_spread": float(lengths.std() / max(1e-9, lengths.mean())),
        "trained_share": shares,
    }


def write_sequences(folder: Path, seq: Any, items: pa.Table) -> None:
    seq.save(folder)
    pq.write_table(items, folder / "items.parquet")


def _write_sids(folder: Path, sids: np.ndarray) -> None:
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
