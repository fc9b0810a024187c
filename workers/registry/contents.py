"""The content of a version, before it is published and after it was read back."""

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
"""Names of the arrays of `Transitions`, each in a file of its own."""


@dataclass(frozen=True, slots=True)
class VersionContents:
    """The content of one registry version.

    Attributes:
        dense: Safetensors file of the dense weights.
        rows: By table, all of its rows.
        counts: Files of the transition counts by name, including `meta`; empty for a run without a memory.
        catalogue: Version of the trie.
        source: Where the content comes from: run, stage, step, commit.
    """

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
        """Read the content of a checkpoint.

        Args:
            commit_dir: Folder of the checkpoint.
            run: RunSetup of the run.
            artifact_dirs: Folder of each kind of artifact.
            catalogue: Version of the trie.
            source: Where the content comes from.
        """
        update = load_update(commit_dir, run.make_table_specs())
        rows = {
            name: RowLayer.from_tables(update["tables"][name], spec.dim)
            for name, spec in run.make_table_specs().items()
        }
        counts = {} if run.memory is None else list_count_files(artifact_dirs)
        return cls(commit_dir / "dense" / "model.safetensors", rows, counts, catalogue, source)


def list_count_files(artifact_dirs: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of the transition counts among a run's artifacts, by name."""
    folder = Path(artifact_dirs["transitions"])
    return {name: folder / f"{name}.npy" for name in COUNTS} | {"meta": folder / "meta.json"}


def load_recommender(
    dense: Path,
    counts: Mapping[str, Path],
    reader: SparseReader,
    run: Any,
    corpus: Corpus,
    device: str = "cpu",
) -> Recommender:
    """Build a recommender from the files of a version.

    Args:
        dense: Safetensors file of the dense weights.
        counts: Files of the transition counts by name.
        reader: Reader of the sparse rows.
        run: RunSetup that the model was trained with.
        corpus: The catalogue and its semantic ids.
        device: Torch device of the model.
    """
    model = build_model(run.model, corpus.codes, run.get_feature_dims(), run.seed).to(device)
    load_weights(model, dense)
    return make_recommender(model, counts, reader, run, corpus)


def make_recommender(
    model: Any, counts: Mapping[str, Path], reader: SparseReader, run: Any, corpus: Corpus
) -> Recommender:
    """Build a recommender with a module that has its weights; the other arguments are those of `load_recommender`."""
    voters = None
    if run.memory is not None:
        voters = Voters(Transitions.map(counts), corpus.trie, VoteOptions(**run.memory))
    model.eval()
    return Recommender(model, reader, dict(run.features), corpus, run.history, voters)


def put_layer(put: Callable[[np.ndarray], tuple[str, int]], layer: RowLayer) -> tuple[dict[str, str], int]:
    """Store the arrays of a layer.

    Args:
        put: Stores one array and returns its blob and the bytes written.
        layer: Rows of one table.

    Returns:
        The blobs by array name, and the bytes written.
    """
    blobs, written_bytes = {}, 0
    for name, array in layer.to_arrays().items():
        blobs[name], new_bytes = put(array)
        written_bytes += new_bytes
    return blobs, written_bytes
