"""The content of a version, before it is published and after it was read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nonet.embedding.reading import RowLayer, SparseReader, merge_layers
from nonet.embedding.storage import load_update
from nonet.models import build_model
from nonet.models.generation import (
    Corpus,
    Recommender,
    VoteOptions,
    Voters,
    list_memory_files,
)
from nonet.workers import load_weights, merge_shards
from nonet.workers.registry.blobs import BlobStore
from nonet.workers.registry.version import DELTA, FULL, Version

_MAX_DELTA_SHARE = 0.3  # Share of all rows; if more have changed, a full version is written.
_MAX_LAYERS = 16  # Maximum number of a full version and its deltas, since a reader searches each of them.


@dataclass(frozen=True, slots=True)
class VersionContents:
    """The content of one registry version.

    Attributes:
        dense: Safetensors file of the dense weights.
        rows: By table, all of its rows.
        counts: Files of the memory by name (`list_memory_files`); empty for a run without a memory.
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
        counts = {} if run.memory is None else list_memory_files(Path(artifact_dirs["transitions"]))
        return cls(commit_dir / "dense" / "model.safetensors", rows, counts, catalogue, source)


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
        voters = Voters.open(counts, corpus.trie, VoteOptions(**run.memory))
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


def store_contents(
    contents: VersionContents,
    blobs: BlobStore,
    base: int | None,
    base_layers: Mapping[str, list[RowLayer]] | None,
    merged_file: Path,
) -> Version:
    """Store the files of a version.

    Args:
        contents: Its content.
        blobs: Where the files are stored; readers ignore them until a manifest names them.
        base: The number of the version that it is made from, None for none.
        base_layers: The rows of the base by table, as changes of which its rows may be stored; None if there are none or they
            cannot be read.
        merged_file: A path for the merged dense weights, which is deleted at the end.

    Returns:
        The manifest, with the first number that is free if there is no version after the base.
    """
    dense, written_bytes = blobs.put_file(merge_shards(contents.dense, merged_file))
    merged_file.unlink(missing_ok=True)
    counts = {}
    for name, path in contents.counts.items():
        counts[name], new_bytes = blobs.put_file(path)
        written_bytes += new_bytes
    known_layers = base_layers or {}
    has_max_layers = max((len(layers) for layers in known_layers.values()), default=0) >= _MAX_LAYERS
    changes = {
        table: layer.diff(merge_layers(known_layers[table])) if table in known_layers else layer
        for table, layer in contents.rows.items()
    }
    total_rows = sum(len(layer.key) for layer in contents.rows.values())
    changed_rows = sum(len(layer.key) + len(layer.gone) for layer in changes.values())
    is_full = base_layers is None or has_max_layers or changed_rows > _MAX_DELTA_SHARE * max(1, total_rows)
    row_blobs = {}
    layers = contents.rows if is_full else changes
    for table, layer in layers.items():
        row_blobs[table], new_bytes = put_layer(blobs.put_array, layer)
        written_bytes += new_bytes
    return Version(
        number=(base or 0) + 1,
        base=base,
        kind=FULL if is_full else DELTA,
        source=contents.source | {"published": time.time()},
        catalogue=contents.catalogue,
        dense=dense,
        counts=counts,
        rows=row_blobs,
        written=written_bytes,
        touched={table: len(layer.key) for table, layer in layers.items()},
    )
