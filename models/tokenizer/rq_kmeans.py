"""Residual k-means: clusters the vectors of items, then the residuals of each level, so the first code is the coarsest.

TIGER, Rajput et al. 2023. The same vectors and seed give the same codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.addresses import is_address
from nonet.models.tokenizer.kinds import TokenisedItems, TokenizeRequest
from nonet.models.tokenizer.semantic_ids import add_collision_level, make_extended_tokens
from nonet.models.tokenizer.text_sources import list_encoders
from nonet.models.tokenizer.vectors import check_sources, compute_item_vectors, parse_weights, resolve_sources
from nonet.random import rng
from nonet.samples.tokenised import VECTOR_FILES

# Shapes: I items, D vector width, L levels, K codes of a level.
_ITERATIONS = 30  # Maximum number of k-means iterations.
_DEFAULT_SOURCES = ("title", "categories", "cooccurrence")
# Training vectors per code (the limit of FAISS): more take time without better centres.
_SAMPLES_PER_CODE = 256
_CHUNK_ROWS = 1 << 16  # Vectors per chunk of residuals.
_CHUNK_DISTANCES = 1 << 24  # Distances per chunk.


def encode_items(request: TokenizeRequest, options: Mapping[str, Any]) -> TokenisedItems:
    """Compute the semantic ids of items from their vectors; with known ids, only new items are coded (see `KnownSids.extend`)."""
    items, seq, known = request.items, request.seq, request.known
    sources = options.get("vectors", _DEFAULT_SOURCES)
    vectors = compute_item_vectors(
        items, seq, sources, dim=options.get("dim", 64), seed=request.seed, folder=request.folder
    )
    levels, codes = options.get("levels", 3), options.get("codes", 64)
    if known is not None:
        return make_extended_tokens(
            known.extend(vectors, seq.get_item_keys(np.arange(len(items)))), known.codes, known, seq
        )
    return add_collision_level(
        quantise_residuals(vectors, levels, codes, request.seed), (codes,) * levels, always=True
    )


def check_vectors(items: pa.Table, options: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError or DataError if a source of vectors does not exist or is not valid."""
    check_sources(options.get("vectors", _DEFAULT_SOURCES), items, folder)


def resolve_paths(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options with the absolute paths of files and text encoders among the sources of vectors."""
    return {**options, "vectors": resolve_sources(options.get("vectors", _DEFAULT_SOURCES), folder)}


def list_inputs(options: Mapping[str, Any], folder: Path) -> list[Path] | None:
    """Return the files of vectors and encoders, sorted; None if an encoder is at an address or has linked folders."""
    sources = options.get("vectors", _DEFAULT_SOURCES)
    files = [folder / name for name in parse_weights(sources) if Path(name).suffix in VECTOR_FILES]
    for encoder in list_encoders(sources).values():
        if is_address(encoder["path"]):
            return None
        found = list((folder / encoder["path"]).rglob("*"))
        if any(path.is_symlink() and path.is_dir() for path in found):
            return None  # which `rglob` does not enter
        files += found
    return sorted(file for file in files if file.is_file())


def quantise_residuals(vectors: np.ndarray, n_levels: int, n_codes: int, seed: int) -> np.ndarray:
    """Compute the residual k-means codes [I, n_levels] int32 of vectors [I, D]."""
    residual = vectors.astype(np.float32, copy=True)
    codes_IL = np.empty((len(vectors), n_levels), np.int32)
    for level in range(n_levels):
        centres = _fit_kmeans(residual, n_codes, seed, level)
        codes_IL[:, level], _ = _find_nearest(residual, centres)
        for start in range(0, len(residual), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            residual[rows] -= centres[codes_IL[rows, level]]
    return codes_IL


def _fit_kmeans(vectors: np.ndarray, n_codes: int, seed: int, level: int) -> np.ndarray:
    """Fit the centres [n_codes, D] of one level; the centre of a code without vectors moves to a vector far from its centre."""
    generator = rng(seed, "tokenise", "kmeans", level)
    if len(vectors) > _SAMPLES_PER_CODE * n_codes:
        vectors = vectors[np.sort(generator.choice(len(vectors), _SAMPLES_PER_CODE * n_codes, replace=False))]
    centres = _draw_seeds(vectors, n_codes, generator)
    previous_code = None
    for _ in range(_ITERATIONS):
        code, distance = _find_nearest(vectors, centres)
        if previous_code is not None and np.array_equal(code, previous_code):
            break
        previous_code = code.copy()
        _fill_empty_codes(code, distance, n_codes)
        count = np.bincount(code, minlength=n_codes)
        sums = np.zeros(centres.shape, np.float64)
        # Sums over sorted vectors are 20 times as fast as np.add.at.
        order = np.argsort(code, kind="stable")
        sums[count > 0] = np.add.reduceat(
            vectors[order], (np.cumsum(count) - count)[count > 0], axis=0, dtype=np.float64
        )
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres).astype(
            np.float32
        )
    return centres


def _draw_seeds(vectors: np.ndarray, n_codes: int, generator: np.random.Generator) -> np.ndarray:
    """Draw k-means++ seeds [n_codes, D]: a vector's probability is proportional to its squared distance from earlier seeds."""
    seed_rows = [int(generator.integers(len(vectors)))]
    squared_distance = ((vectors - vectors[seed_rows[0]]) ** 2).sum(1, dtype=np.float64)
    for _ in range(n_codes - 1):
        total = squared_distance.sum()
        row = (
            int(generator.choice(len(vectors), p=squared_distance / total))
            if total > 0
            else int(generator.integers(len(vectors)))
        )
        seed_rows.append(row)
        squared_distance = np.minimum(
            squared_distance, ((vectors - vectors[row]) ** 2).sum(1, dtype=np.float64)
        )
    return vectors[seed_rows].copy()


def _find_nearest(vectors: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest centre [I] and the squared distance to it [I]; ties go to the lower code."""
    code, distance = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    square_K = (centres**2).sum(1)
    chunk_rows = max(1, _CHUNK_DISTANCES // len(centres))
    for start in range(0, len(vectors), chunk_rows):
        chunk = vectors[start : start + chunk_rows]
        # The squared distance without the square of the vector, which is the same for all codes.
        offset_distance = square_K - 2 * chunk @ centres.T
        code[start : start + chunk_rows] = offset_distance.argmin(1)
        distance[start : start + chunk_rows] = offset_distance.min(1) + (chunk**2).sum(1)
    return code, distance


def _fill_empty_codes(code: np.ndarray, distance: np.ndarray, n_codes: int) -> None:
    """Assign to each empty code one of the vectors farthest from their centres, in place in `code`.

    Vectors that equal their centre keep their code.
    """
    empty_codes = np.flatnonzero(np.bincount(code, minlength=n_codes) == 0)
    farthest_rows = np.argsort(-distance, kind="stable")[: len(empty_codes)]
    for empty_code, row in zip(empty_codes, farthest_rows, strict=False):
        if distance[row] > 1e-9:
            code[row] = empty_code
