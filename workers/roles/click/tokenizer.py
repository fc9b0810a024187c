"""ClickTokeniser: the tokenise stage of a click model: sequences and items, no semantic ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nonet.workers.roles import DataSetup, facts_of, keep, write_sequences
from nonet.workers.runtime import DistributeWorker, Replicate, method


class ClickTokeniser(DistributeWorker):
    """Runs the tokenise stage on rank 0 of its group."""

    @method(collect="first", data=Replicate)
    def prepare(self, data: DataSetup, run_folder: str) -> dict[str, Any]:
        """Write run_folder/artifacts/sequences-<sha8>; {"artifacts", "data", "tokenizer": {}}."""
        if self.rank:
            return {}
        seq, items = data.build()
        root = Path(run_folder) / "artifacts"
        written = {"sequences": keep(root, "sequences", lambda folder: write_sequences(folder, seq, items))}
        return {"artifacts": written, "tokenizer": {}, **facts_of(seq, items, data)}
