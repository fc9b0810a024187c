"""Contents: what a version holds, before it is published and after it was read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nonet.embedding.reading import RowLayer, SparseReader
from nonet.embedding.storage import load_update
from nonet.models import build_model
from nonet.models.generation import Corpus, Recommender, VoteOptions, Voters
from nonet.samples.sequences import Transitions
from nonet.workers import load_weights

COUNTS = ("row", "item", "count", "occurs")


@dataclass(frozen=True, slots=True)
class VersionContents:
    """dense: a safetensors file; rows: table -> all of its rows; counts: files of the memory's counts by name, `meta` among
    them, empty without a memory; catalogue: the version of the trie; source: where all this came from."""

    dense: Path
    rows: Mapping[str, RowLayer]
    counts: Mapping[str, Path]
    catalogue: str
    source: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_commit(
        cls,
        commit_dir: Path,
        run: Any,
        artifact_dirs: Mapping[str, str],
        catalogue: str,
        source: dict[str, Any],
    ) -> VersionContents:
        """Of a commit's folder; run: its RunSetup; folders: the artifacts by kind."""
        update = load_update(commit_dir, run.specs())
        rows = {
            name: RowLayer.from_tables(update["tables"][name], spec.dim) for name, spec in run.specs().items()
        }
        counts = {}
        if run.memory is not None:
            counts = list_count_files(artifact_dirs)
        return cls(commit_dir / "dense" / "model.safetensors", rows, counts, catalogue, source)


def list_count_files(artifact_dirs: Mapping[str, str]) -> dict[str, Path]:
    """The files of a memory's counts among a run's artifacts."""
    home = Path(artifact_dirs["transitions"])
    return {name: home / f"{name}.npy" for name in COUNTS} | {"meta": home / "meta.json"}


def load_recommender(
    dense: Path,
    counts: Mapping[str, Path],
    reader: SparseReader,
    run: Any,
    corpus: Corpus,
    device: str = "cpu",
) -> Recommender:
    """A recommender out of a version's files; run: the RunSetup that it was trained with."""
    model = build_model(run.model, corpus.codes, run.feature_dims(), run.seed).to(device)
    load_weights(model, dense)
    voters = None
    if run.memory is not None:
        voters = Voters(Transitions.map(counts), corpus.trie, VoteOptions(**run.memory))
    model.eval()
    return Recommender(model, reader, dict(run.features), corpus, run.history, voters)


def put_layer(put: Callable[[np.ndarray], tuple[str, int]], layer: RowLayer) -> tuple[dict[str, str], int]:
    """Store a layer's arrays; their blobs, and the bytes written."""
    names, written = {}, 0
    for name, array in layer.to_arrays().items():
        names[name], new = put(array)
        written += new
    return names, written
