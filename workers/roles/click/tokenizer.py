"""ClickTokeniser: the tokenise stage of a click model, which writes sequences, items and graphs but no semantic ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.models.clicks import count_labels, find_separating_columns
from nonet.samples.batches.graphs import Graphs
from nonet.samples.sequences import TRAIN, Sequences
from nonet.samples.tables import list_names
from nonet.storage import put
from nonet.workers.roles.artifacts import (
    DataSetup,
    describe_data,
    make_sequences,
    read_preparation_facts,
    store_artifact,
)
from nonet.workers.runtime import DistributeWorker, Replicate, method


class ClickTokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write the sequences, items and graphs to run_folder/artifacts.

        Args:
            data: The data and how they are read.
            run_folder: Folder of the run.

        Returns:
            The same as `Tokeniser.prepare`, with an empty "tokenizer", and with the numbers of labels (`count_labels`) in "data".
        """
        if self.rank != 0:
            return {}
        root = Path(run_folder) / "artifacts"
        shared = data.open_cache(root)
        seq, items, artifact = make_sequences(data, root, shared)
        new_artifact, new_counts = data.store_new_events(root, seq)
        artifacts = {"sequences": artifact, **new_artifact}
        facts = describe_data(seq, items, data)
        facts["data"] = {**facts["data"], "labels": count_labels(seq), **new_counts}
        if data.graphs:
            graphs: list[Graphs] = []
            artifacts["graphs"] = store_artifact(
                root, "graphs", lambda folder: graphs.append(data.build_graphs(seq, items, folder))
            )
            facts["data"]["graphs"] = graphs[0].count_edges()
        if warning := _warn_of_separating_columns(seq, data):
            notice = facts["data"].get("notice", "")
            facts["data"] = {**facts["data"], "notice": f"{notice} {warning}".strip()}
        if data.stored is not None:
            facts["data"]["stored"] = data.stored.write(seq, {"sequences": artifact["path"]})
        facts["data"] |= read_preparation_facts(root)
        put(root)
        return {"artifacts": artifacts, "tokenizer": {}, **facts, **shared.describe()}


def _warn_of_separating_columns(seq: Sequences, data: DataSetup) -> str:
    """Return a warning if a column that no target condition names separates the training labels; "" otherwise."""
    is_train = np.asarray(seq.split) == TRAIN
    texts: list[str] = []
    condition_columns = set().union(*map(list_names, data.options.targets.values()))
    for target in data.options.targets:
        if target not in seq.targets:
            continue
        is_labelled = is_train & seq.find_labelled(target)
        other_columns = {
            column: np.asarray(seq.columns[column])[is_labelled]
            for column in seq.feature_columns
            if column not in condition_columns
        }
        auc_by_column = find_separating_columns(other_columns, np.asarray(seq.targets[target])[is_labelled])
        if auc_by_column:
            listed = ", ".join(f"{column} (AUC {auc:.4f})" for column, auc in auc_by_column.items())
            texts.append(f"columns that separate the training labels of stages.{target}.target: {listed}")
    return (
        f"{'; '.join(texts)}; as a feature such a column is the label, known before its time" if texts else ""
    )
