"""ClickTokeniser: the tokenise stage of a click model, which writes sequences and items but no semantic ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.models.deepfm import find_columns, find_separating_columns
from nonet.samples.sequences import TRAIN, Sequences
from nonet.workers.roles import DataSetup, describe_data, make_sequences
from nonet.workers.runtime import DistributeWorker, Replicate, method


class ClickTokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write the sequences and items to run_folder/artifacts.

        Args:
            data: The location and format of the data.
            run_folder: Folder of the run.

        Returns:
            The same as `Tokeniser.prepare`, with an empty "tokenizer".
        """
        if self.rank:
            return {}
        seq, items, sequences = make_sequences(data, Path(run_folder) / "artifacts")
        facts = describe_data(seq, items, data)
        if warning := _warn_of_separating_columns(seq, data):
            notice = facts["data"].get("notice", "")
            facts["data"] = {**facts["data"], "notice": f"{notice} {warning}".strip()}
        return {"artifacts": {"sequences": sequences}, "tokenizer": {}, **facts}


def _warn_of_separating_columns(seq: Sequences, data: DataSetup) -> str:
    """Return a warning if a column that no target condition names separates the training labels; "" otherwise."""
    train = np.asarray(seq.split) == TRAIN
    auc_by_column: dict[str, float] = {}
    for name, condition in data.options.targets.items():
        if name not in seq.targets:
            continue
        condition_columns = find_columns(condition)
        columns = {
            key: np.asarray(values)[train]
            for key, values in seq.columns.items()
            if key not in condition_columns
        }
        auc_by_column |= find_separating_columns(columns, np.asarray(seq.targets[name])[train])
    if not auc_by_column:
        return ""
    texts = ", ".join(f"{name} (AUC {value:.4f})" for name, value in auc_by_column.items())
    return f"columns that separate the training labels: {texts}; as a feature such a column is the label, known before its time"
