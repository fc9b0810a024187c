"""Tokeniser: creates the artifacts of a run (sequences, semantic ids, catalogue trie and transitions) from its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from nonet.samples.preparation import EventLog
from nonet.samples.sequences import TEST, TRAIN, VALID, EventTotals, Sequences, Transitions
from nonet.samples.tables import get_licence_notice
from nonet.storage import put
from nonet.workers.devices import HOST, get_device
from nonet.workers.roles.artifacts.cache import MadeArtifacts
from nonet.workers.roles.artifacts.data_setup import DataSetup
from nonet.workers.roles.artifacts.folders import store_artifact, write_sids
from nonet.workers.roles.artifacts.sequences import make_sequences, read_preparation_facts
from nonet.workers.runtime import DistributeWorker, Replicate, method


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
        """Take the artifacts from the cache, or make and write them, and return the result of `prepare`."""
        root = Path(run_folder) / "artifacts"
        shared = data.open_cache(root)
        seq, items, sequences_artifact = make_sequences(data, root, shared)
        new_artifact, new_counts = data.store_new_events(root, seq)
        ids = shared.get_or_make_from(
            "sequences", "sids", data.describe_tokenizer, lambda: _make_ids(data, root, seq, items)
        )
        memory = shared.get_or_make_from(
            "sequences", "transitions", data.describe_memory, lambda: _count_memory(data, root, seq, items)
        )
        artifacts = {
            artifact["kind"]: artifact for artifact in (sequences_artifact, *ids.artifacts, *memory.artifacts)
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
        return {"artifacts": artifacts, "tokenizer": ids.facts, **facts, **shared.describe()}


def _make_ids(data: DataSetup, root: Path, seq: Sequences, items: pa.Table) -> MadeArtifacts:
    """Compute the semantic ids of the items, and write them and their trie; the facts are the report of the tokenizer."""
    from nonet.models.generation import Trie
    from nonet.models.tokenizer import tokenise

    known_sids = data.known and data.known.load_sids()
    tokens = tokenise(
        items, seq, dict(data.tokenizer), seed=data.seed, folder=Path(data.folder), known=known_sids
    )
    trie = Trie.build(tokens.sids, tokens.codes)
    sids = store_artifact(root, "sids", lambda folder: write_sids(folder, tokens.sids))
    return MadeArtifacts((sids, store_artifact(root, "catalogue", trie.save)), tokens.report)


def _count_memory(data: DataSetup, root: Path, seq: Sequences, items: pa.Table) -> MadeArtifacts:
    """Count what the memory votes with, and write it."""
    artifact = store_artifact(root, "transitions", lambda folder: data.write_memory(folder, seq, items))
    return MadeArtifacts((artifact,), {})


def _describe_cold_items(seq: Sequences, items: pa.Table) -> dict[str, int]:
    """Return the number of "items" without a training event, and of validation and test events with one, "valid" and "test"."""
    is_cold = items["events"].to_numpy() == 0
    counts = {"items": int(is_cold.sum()), "valid": 0, "test": 0}
    for part in seq.iterate_parts():
        for name, split in (("valid", VALID), ("test", TEST)):
            counts[name] += int(is_cold[part.item[part.split == split]].sum())
    return counts


def describe_data(seq: Sequences, items: pa.Table, data: DataSetup) -> dict[str, Any]:
    """Return facts about the data.

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
