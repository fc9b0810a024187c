"""ClickTokeniser: the tokenise stage of a click model: sequences and items, no semantic ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.models.deepfm import find_columns, find_separating_columns
from nonet.samples.sequences import TRAIN, Sequences
from nonet.workers.roles import DataSetup, facts_of, sequences_of
from nonet.workers.runtime import DistributeWorker, Replicate, method


class ClickTokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write run_folder/artifacts/sequences-<sha8>; {"artifacts", "data", "tokenizer": {}}."""
        if self.rank:
            return {}
        seq, items, sequences = sequences_of(data, Path(run_folder) / "artifacts")
        facts = facts_of(seq, items, data)
        if warning := _separated(seq, data):
            notice = facts["data"].get("notice", "")
            facts["data"] = {**facts["data"], "notice": f"{notice} {warning}".strip()}
        return {"artifacts": {"sequences": sequences}, "tokenizer": {}, **facts}


def _separated(seq: Sequences, data: DataSetup) -> str:
    """Return a warning of columns whose values separate the training labels, though no condition names them; "" without any."""
    train = np.asarray(seq.split) == TRAIN
    found: dict[str, float] = {}
    for name, condition in data.targets.items():
        if name not in seq.targets:
            continue
        told = find_columns(condition)
        columns = {key: np.asarray(values)[train] for key, values in seq.columns.items() if key not in told}
        found |= find_separating_columns(columns, np.asarray(seq.targets[name])[train])
    if not found:
        return ""
    named = ", ".join(f"{name} (AUC {value:.4f})" for name, value in found.items())
    return f"columns that separate the training labels: {named}; as a feature such a column is the label, known before its time"
