"""ClickTokeniser: the tokenise stage of a click model: sequences and items, no semantic ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        return {"artifacts": {"sequences": sequences}, "tokenizer": {}, **facts_of(seq, items, data)}
